"""The report's table of a simulated step beside the measured one, and what of it is put into plan.json."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.report.synthetic import PLAN, step_rows, write
from tilewright.report.page import render, write_report
from tilewright.report.run_data.collect_run import collect
from tilewright.report.run_data.forecast_table import forecast_view, measured

TOLD = {
    "step_s": 2.0, "exchange_s": 0.5, "bound_s": 0.75, "idle": 0.25, "sent_bytes": {"dp_shard": 2048.0, "pp": 512.0},
    "peak_bytes": [3 * 2**30, 2**30],
}  # fmt: skip
SENT = {
    "sent_bytes": [9, 3072, 3072, 3072], "exchange_exposed_s": [9.0, 0.5, 0.5, 0.5],
    "sent_bytes.dp_shard.all_gather.fp32": [9, 1024, 1024, 1024],
    "sent_bytes.efsdp.reduce_scatter.fp32": [9, 1024, 1024, 1024], "sent_bytes.pp.send.fp32": [9, 1024, 1024, 1024],
}  # fmt: skip
RANKS = {"step": 4, "ranks": [{"rank": rank, "step_s": 1.0 + rank / 4, "peak_bytes": 2**30} for rank in range(4)]}
PIPED = {"history": [{"step": 2, "idle": 0.2}, {"step": 3, "idle": 0.3}]}


def _run(folder, told=TOLD, ranks=RANKS, piped=PIPED, sent=SENT):
    write(folder, step_rows([1.0] * 4, **sent), plan=PLAN | {"simulated": told})
    (folder / "ranks.json").write_text(json.dumps(ranks))
    (folder / "pipeline.json").write_text(json.dumps(piped))
    return collect(folder)


def test_what_was_simulated_is_beside_what_was_measured(tmp_path):
    run = _run(tmp_path)
    view = forecast_view(run)
    assert view.rows == [
        ("Step", "2.0 s", "1.8 s", "+14.3 %"),
        ("Idle in the pipeline", "25.0 %", "25.0 %", "+0.0 %"),
        ("Exchanges that nothing hides", "500 ms", "500 ms", "+0.0 %"),
        ("Sent per step: shards", "2.00 KiB", "2.00 KiB", "+0.0 %"),
        ("Sent per step: stages", "512 B", "1.00 KiB", "-50.0 %"),
        ("Memory of rank 0", "3.00 GiB", "1.00 GiB", "+200.0 %"),
        ("Memory of rank 1", "3.00 GiB", "1.00 GiB", "+200.0 %"),
        ("Memory of rank 2", "1.00 GiB", "1.00 GiB", "+0.0 %"),
        ("Memory of rank 3", "1.00 GiB", "1.00 GiB", "+0.0 %"),
    ]
    assert "750 ms" in view.words
    assert "within that" in view.words
    assert "Simulated and measured" in render(run)


def test_exchanges_that_take_longer_than_the_bound_are_told(tmp_path):
    assert "above that" in forecast_view(_run(tmp_path, told=TOLD | {"bound_s": 0.25})).words


def test_the_plan_of_a_reported_run_has_both(tmp_path):
    run = _run(tmp_path)
    for _ in range(2):
        write_report(tmp_path)
        found = json.loads((tmp_path / "plan.json").read_text())
        assert found["simulated"] == TOLD
        assert found["measured"] == measured(run)
        assert found["measured"]["step_s"] == 1.75
        assert {name: found[name] for name in PLAN} == PLAN


def test_a_run_without_a_simulated_step_is_left_alone(tmp_path):
    write(tmp_path, step_rows([1.0] * 4), plan=PLAN)
    before = (tmp_path / "plan.json").read_bytes()
    assert forecast_view(collect(tmp_path)) is None
    assert "Simulated and measured" not in render(collect(tmp_path))
    write_report(tmp_path)
    assert (tmp_path / "plan.json").read_bytes() == before


_ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.integers(-(10**30), 10**400)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*TOLD, "a"]), inner)),
    max_leaves=6,
)


@examples(25)
@given(_ANY, st.sampled_from([*TOLD, "ranks", "rank", "history", "sent_bytes.dp_shard.all_gather.fp32"]))
def test_damaged_values_give_a_page(tmp_path_factory, value, place):
    folder, told, ranks, piped, sent = tmp_path_factory.mktemp("run"), dict(TOLD), dict(RANKS), dict(PIPED), dict(SENT)
    if place in told:
        told[place] = value
    elif place == "ranks":
        ranks["ranks"] = value
    elif place == "rank":
        ranks["ranks"] = [{"rank": 0, "step_s": value, "peak_bytes": value}]
    elif place == "history":
        piped["history"] = value
    else:
        sent[place] = [value] * 4
    assert render(_run(folder, told, ranks, piped, sent))
