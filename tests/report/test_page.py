"""The report: whole, offline, escaped, tolerant, and made of the run folder's numbers alone."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.cover import covering
from tests.report.conftest import write_run
from tilewright.core.errors import DataError
from tilewright.core.units import format_bytes, format_perplexity
from tilewright.report.figures.run_figures import bits_figure, memory_bars_figure, perplexity_figure
from tilewright.report.page import render, write_report
from tilewright.report.run_data.collect_run import collect
from tilewright.report.run_data.run_numbers import held_out_losses, settled_norms, total_tokens
from tilewright.report.summary import MISSING, cards, learned
from tilewright.report.tables import event_rows, facts, kernel_rows, memory_table, precision_groups, tier_rows

VOID = {"meta", "br", "link", "img", "input", "hr"}
SELF_CLOSED = {"rect", "line", "path", "circle"}


class Outline(HTMLParser):
    """Checks that tags balance; keeps text, links and everything that could load something."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.links, self.ids, self.attributes = [], [], [], [], set()

    def handle_starttag(self, tag, attrs):
        self._note(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in SELF_CLOSED, tag
        self._note(attrs)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> without a start"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def _note(self, attrs):
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("href", "src", "xlink:href", "action"):
                self.links.append(value)
            elif name == "id":
                self.ids.append(value)


def outline(html: str) -> Outline:
    parser = Outline()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def test_report_is_one_balanced_file_that_loads_nothing(run_dir):
    before = list(run_dir.iterdir())
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    html = path.read_text(encoding="utf-8")
    page = outline(html)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not re.search(r"https?://|<script|@import|url\(", html)
    assert html.count("<svg") == 10, "every chart is drawn"
    assert {p.name for p in run_dir.iterdir()} == {p.name for p in before} | {"report.html"}


def test_text_of_the_run_is_escaped(run_dir):
    evil = '<img src=x onerror="alert(1)">'
    with open(run_dir / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 400, "time_s": 1.0, "kind": "fallback", "message": evil}) + "\n")
    (run_dir / "data.json").write_text(json.dumps({"domains": {evil: {"docs": 3}}, evil: evil}), encoding="utf-8")
    (run_dir / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": evil, "text": evil}), encoding="utf-8")
    html = write_report(run_dir).read_text(encoding="utf-8")
    assert "<img" not in html
    assert html.count("&lt;img") >= 6
    outline(html)


EVIL = """'"><script>alert(1)</script><img src=x onerror="alert(1)">"""
TEXTS = ("metrics.jsonl", "events.jsonl", "samples.jsonl", "plan.json", "machine.json", "data.json", "precision.json")


def spoiled(value, keys: bool):
    """A JSON value with EVIL behind every text in it, or behind every key too."""
    if isinstance(value, dict):
        return {key + EVIL * keys: spoiled(inner, keys) for key, inner in value.items()}
    if isinstance(value, list):
        return [spoiled(inner, keys) for inner in value]
    return value + EVIL if isinstance(value, str) else value


@pytest.mark.parametrize(("name", "keys"), covering(tuple(TEXTS), (False, True), pairs=False))
def test_text_from_every_file_of_a_run_is_escaped(run_dir, name, keys):
    path = run_dir / name
    lines = path.read_text(encoding="utf-8").splitlines() if name.endswith(".jsonl") else [path.read_text()]
    path.write_text("\n".join(json.dumps(spoiled(json.loads(line), keys)) for line in lines), encoding="utf-8")
    assert_no_code(write_report(run_dir))


def test_text_from_the_recipe_is_escaped(run_dir):
    path = run_dir / "run.toml"
    path.write_text(re.sub(r'"([^"\n]*)"', lambda text: json.dumps(text[1] + EVIL), path.read_text()))
    assert EVIL.partition(">")[2][:8] in path.read_text()
    assert_no_code(write_report(run_dir))


def assert_no_code(path) -> None:
    html = path.read_text(encoding="utf-8")
    assert not re.search(r"<script|<img", html)
    page = outline(html)
    assert not [name for name in page.attributes if name.startswith("on")]


def test_numbers_of_the_head_come_from_the_files(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "eval" not in row]
    run = collect(run_dir)
    by_label = {card.label: card for card in cards(run)}
    end = sum(row["loss"] for row in steps[-20:]) / 20
    assert by_label["Loss"].value == f"{steps[0]['loss']:.2f} → {end:.2f}"
    assert total_tokens(run) == steps[-1]["tokens"]
    assert by_label["Tokens"].value == "3.28M"
    peak = max(row["memory_bytes"] for row in steps)
    assert by_label["Peak memory"].value == f"{peak / 2**20:.0f} MiB"
    assert "1000 MiB" in by_label["Peak memory"].detail
    losses = [rows[-1]["eval"][d]["loss"] for d in rows[-1]["eval"]]
    assert by_label["Held-out perplexity"].value == format_perplexity(sum(losses) / len(losses))
    assert learned(run).startswith(
        f"The loss fell from {steps[0]['loss']:.2f} to {end:.2f} nats per token in 400 steps"
    )


def test_held_out_perplexity_weighs_domains_by_tokens(run_dir):
    (run_dir / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 1.0})
        + "\n"
        + json.dumps({"step": 1, "eval": {"a": {"loss": 0.0, "tokens": 3}, "b": {"loss": 4.0, "tokens": 1}}})
        + "\n"
    )
    assert {t.label: t.value for t in cards(collect(run_dir))}["Held-out perplexity"] == "2.718"


def test_bits_per_byte_weigh_domains_by_bytes_and_stand_beside_compressors(run_dir):
    results = {
        "a": {"loss": math.log(2), "tokens": 30, "bytes": 30},
        "b": {"loss": 3 * math.log(2), "tokens": 10, "bytes": 90},
    }
    (run_dir / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 1.0}) + "\n" + json.dumps({"step": 1, "eval": results}) + "\n"
    )
    domains = {"a": {"compressors": {"gzip": 2.0, "xz": 1.0}}, "b": {"compressors": {"gzip": 4.0, "xz": 3.0}}}
    (run_dir / "data.json").write_text(json.dumps({"domains": domains}))
    run = collect(run_dir)
    card = {t.label: t for t in cards(run)}["Held-out bits per byte"]
    assert card.value == "0.500"  # 30 and 30 bits of 120 bytes
    assert "gzip -9 3.500, xz -9 2.500" in card.detail
    assert "0.500 bits per byte (gzip -9: 3.500, xz -9: 2.500)" in learned(run)
    page = render(run)
    assert all(text in page for text in ("Held-out bits per byte", "gzip -9", "xz -9"))


def test_only_the_newest_samples_are_shown(run_dir):
    rows = [{"step": 5, "domain": "code", "prompt": "old", "text": "x"}]
    rows += [{"step": 9, "domain": name, "prompt": f"new {name}", "text": "<b>"} for name in ("code", "prose")]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render(collect(run_dir))
    assert "new code" in page
    assert "step 9, prose" in page
    assert "<mark>old" not in page


def test_planned_memory_is_that_of_a_training_step(run_dir):
    plan = json.loads((run_dir / "plan.json").read_text())
    plan["phases"]["checkpoint"] = {"parameters": 1, "other": 5 * 2**30}
    plan |= {"peak_phase": "checkpoint", "step_phase": "backward"}
    (run_dir / "plan.json").write_text(json.dumps(plan))
    figure = memory_bars_figure(collect(run_dir))
    planned = sum(plan["phases"]["backward"].values())
    assert f"peak, planned: {planned / 2**20:.0f} MiB" in figure.svg
    assert "activations, planned: 428 MiB" in figure.svg


def test_memory_by_phase_is_the_highest_of_each_phase(run_dir):
    run = collect(run_dir)
    columns, rows = memory_table(run)
    assert columns == ["owner", "forward", "backward"]
    peaks = [row["memory_phases"]["backward"] for row in run.steps if "memory_phases" in row]
    highest = max(peaks, key=lambda owners: sum(owners.values()))
    assert dict((row[0], row[1]) for row in rows)["parameters"] == "1.00 GiB"
    assert rows[-1] == ["sum", "1.00 GiB", format_bytes(sum(highest.values()))]
    assert tier_rows(run) == [("disk", "optimizer", "400 MiB")]
    assert "optimizer 400 MiB on disk." in render(run)


def test_every_number_of_an_empty_run_is_not_recorded(tmp_path):
    (tmp_path / "empty").mkdir()
    run = collect(tmp_path / "empty")
    assert {card.value for card in cards(run)} == {MISSING}
    html = render(run)
    page = outline(html)
    assert "<svg" not in html
    body = " ".join(page.text)
    assert not re.search(r"\d", body.replace("100 %", "")), "no number without a file"
    assert body.count("not recorded") >= 15


@pytest.mark.parametrize(
    "missing", ["metrics.jsonl", "events.jsonl", "samples.jsonl", "plan.json", "machine.json", "data.json",
                "precision.json", "run.toml"],
)  # fmt: skip
def test_one_missing_file_is_said_and_the_rest_stands(tmp_path, missing):
    html = write_report(write_run(tmp_path / "run", without=(missing,))).read_text(encoding="utf-8")
    outline(html)
    if missing != "plan.json":
        assert "not recorded" in html


def test_damaged_files_are_left_out_and_told(run_dir):
    with open(run_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 401, "loss": 2.')
    (run_dir / "plan.json").write_text("{", encoding="utf-8")
    (run_dir / "run.toml").write_text("[broken\n", encoding="utf-8")
    (run_dir / "precision.json").write_bytes(b"\xff\xfe\x00")
    run = collect(run_dir)
    assert len(run.steps) == 400
    assert len(run.trouble) == 4, run.trouble
    html = write_report(run_dir).read_text(encoding="utf-8")
    outline(html)
    assert "1 line is not JSON" in html


def test_values_that_are_null_or_absent_do_not_stop_a_chart(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows[5:50]:
        if "loss" in row:
            row["loss"], row["grad_norm"] = None, None
            row.pop("tokens_per_s", None)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outline(write_report(run_dir).read_text(encoding="utf-8"))


def test_a_domain_has_one_colour_in_all_charts_and_all_domains_another(run_dir):
    names = ["a", "b", "c", "d"]
    rows = [
        {"step": step, "eval": {n: {"loss": 3.0 - step / 9, "tokens": 10, "bytes": 30} for n in names}}
        for step in (1, 2)
    ]
    rows[0]["eval"]["b0"] = {"loss": 3.0, "tokens": 10}  # no text, so in one chart alone
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = collect(run_dir)
    by_chart = [{name: colour for colour, name, _ in figure(run).legend} for figure in (perplexity_figure, bits_figure)]
    assert all(by_chart[0][name] == by_chart[1][name] for name in names)
    assert by_chart[1]["all"] not in by_chart[0].values()
    assert len(set(by_chart[0].values())) == 5


def test_a_curve_is_of_the_same_rows_and_a_number_of_all(run_dir):
    """Where evaluations on the way take a part of the held-out text and the last one all of it."""
    part = [{"a": {"loss": loss, "tokens": 10, "bytes": 30}} for loss in (4.0, 3.0, 2.0)]
    rows = [{"step": step, "eval": table} for step, table in enumerate(part, 1)]
    rows[-1] = {"step": 3, "eval": {"a": {"loss": 5.0, "tokens": 100, "bytes": 200}}, "eval_part": part[-1]}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = collect(run_dir)
    assert [loss for _, loss in held_out_losses(run)] == [4.0, 3.0, 2.0]
    assert held_out_losses(run, "eval_all")[-1] == (3.0, 5.0)
    bits = 5.0 * 100 / math.log(2) / 200
    assert [value for _, name, value in bits_figure(run).legend if name in ("all", "a")] == [f"{bits:.3f}"]
    card = next(card for card in cards(run) if card.label == "Held-out bits per byte")
    assert card.value == f"{bits:.3f}"
    for figure in (bits_figure, perplexity_figure):
        assert "10 of the 100 held-out tokens" in figure(run).note
    rows[-1].pop("eval_part")
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert bits_figure(collect(run_dir)).note == ""


def test_a_slow_run_is_named_at_the_head_beside_what_is_worse(run_dir):
    plan = json.loads((run_dir / "plan.json").read_text())
    seconds = [s for row in map(json.loads, (run_dir / "metrics.jsonl").open()) if (s := row.get("step_s"))]
    assert seconds
    for factor, named in ((2.0, True), (1.0, False)):
        (run_dir / "plan.json").write_text(json.dumps(plan | {"step_s": sorted(seconds)[len(seconds) // 2] / factor}))
        head = write_report(run_dir).read_text().partition('<dl class="cards">')[0]
        assert ("were planned" in head) == named


def test_later_rows_of_a_step_count(run_dir):
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 2, "loss": 9.0}\n{"step": 1, "loss": 8.0}\n{"step": 2, "loss": 3.0}\n'
    )
    assert collect(run_dir).column("loss") == ([1.0, 2.0], [8.0, 3.0])


def test_norms_of_the_warm_up_stay_out_of_the_distribution(run_dir):
    run = collect(run_dir)
    norms, which = settled_norms(run)
    assert len(norms) == 400 - run.setting("optim", "warmup_steps")
    assert which == "recorded steps after warm-up"
    short = replace(run, steps=run.steps[:15])
    assert settled_norms(short)[1] == "recorded steps", "all of them, and not called otherwise"
    assert len(settled_norms(short)[0]) == 15


def test_settings_carry_their_source(run_dir):
    settings = {s.name: s for s in collect(run_dir).settings}
    assert settings["optim.lr"].value == "0.002"
    assert settings["optim.lr"].source == "file default.toml"
    assert settings["data.domains"].value == '["code", "docs"]'
    assert settings["train.steps"].source == "cli"


def test_rows_of_alike_layers_share_a_line(run_dir):
    groups = precision_groups(collect(run_dir).precision)
    assert [(g.pattern, len(g.members)) for g in groups] == [
        ("embed_tokens", 1),
        ("layers.*.self_attn.q_proj", 6),
        ("layers.*.self_attn.k_proj", 6),
        ("layers.*.input_layernorm", 6),
    ]


def test_kernel_cases_with_one_outcome_share_a_line(run_dir):
    rows = kernel_rows(collect(run_dir).machine)
    assert rows[0].cases == ("cpu bfloat16", "cpu float32")
    assert rows[1].rejected == (("compiled", "no C++ compiler was found"),)


def test_repeated_events_are_counted(run_dir):
    rows = event_rows(collect(run_dir).events)
    assert [(row.kind, row.count) for row in rows if row.kind == "eval"] == [("eval", 2)]


def test_summary_is_laid_flat_with_units():
    flat = facts(
        {"bytes": 2048, "docs": 1234, "rejects": {"binary": 2}, "names": [], "per": {"a": {"x": 1}, "b": {"y": 2}}}
    )
    assert dict(flat.values) == {"bytes": "2.00 KiB", "docs": "1,234", "names": "none"}
    assert flat.tables[0] == ("rejects", ["", ""], [["binary", "2"]])
    assert flat.tables[1] == ("per", ["", "x", "y"], [["a", "1", ""], ["b", "", "2"]])


def test_folder_that_is_not_there_is_a_user_error(tmp_path):
    with pytest.raises(DataError) as error:
        write_report(tmp_path / "nowhere")
    assert error.value.exit_code == 2
    assert "nowhere" in str(error.value)


def test_a_report_is_replaced_whole(run_dir, monkeypatch):
    first = write_report(run_dir).read_bytes()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DataError, match="No space left"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == first
