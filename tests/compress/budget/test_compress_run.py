"""A run compressed: each cut measured, the largest within the budget recovered, artefacts proven, controls."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.models.shapes import make_decoder
from tests.training.tiny import tiny, write_text
from tilewright.cli.app import run as cli
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.artefacts import missed
from tilewright.compress.budget.compress_run import Compression
from tilewright.compress.budget.compress_settings import CompressSettings
from tilewright.compress.budget.held_out_rise import row_losses_of
from tilewright.compress.export.targets import find_targets
from tilewright.compress.prove.consumer_process import ConsumerLimits
from tilewright.compress.prune.prune import prune
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import CheckpointError, ConfigError, FitError, NumericsError
from tilewright.models.decoder.hf_config import read_config
from tilewright.report.pages.compress_page import render_compression, verdict_of
from tilewright.training.session import train

SHAPE = {"model__num_heads": 4, "model__num_kv_heads": 2, "model__ffn_dim": 96, "precision__mode": "fp32"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run that has learned something."""
    options = {"train__steps": 30, "optim__lr": 3e-3, "train__eval_batches": 2, "log__report": False}
    return train(tiny(corpus, tmp_path_factory.mktemp("runs"), **SHAPE, **options)).run_dir


def settings_of(budget="5%", **changes):
    base = {"steps": 4, "tries": 2, "controls": "none", "batches": 2}
    return CompressSettings.of(
        budget, changes.pop("targets", "hf"), changes.pop("kinds", "ffn,heads"), **base | changes
    )


def compression(run, out, settings, said=None):
    lines = [] if said is None else said
    return Compression(
        open_to_export(run), settings, out, open_to_export, lines.append, ConsumerLimits.of_this_machine(120)
    )


def test_what_each_cut_costs_is_measured_once(run, tmp_path):
    said = []
    first = compression(run, tmp_path / "out", settings_of(), said)
    plans = first.plan()
    rows = first.record["sensitivity"]
    assert {row["kind"] for row in rows} == {"ffn", "heads"}
    assert all(row["saved"] > 0 and row["speed"] > 0 and row["error"] >= 0 for row in rows)
    assert {row["units"] for row in rows if row["kind"] == "ffn"} == {32, 64}
    assert len(said) == len(rows)
    times = first.record["time"]
    assert times["step"]["how"] == "the last 29 steps of the run"
    assert {f"recovered-{plan.name}" for plan in plans} | {"exports"} == set(times["predicted"]["stages"])
    assert 0 < times["measured"]["sensitivities"] < 120
    again = compression(run, tmp_path / "out", settings_of(), said)
    assert [plan.name for plan in again.plan()] == [plan.name for plan in plans]
    assert len(said) == len(rows), "measured again"
    assert not (tmp_path / "out" / "cut").exists()


def test_another_question_in_the_same_folder_is_refused(run, tmp_path):
    compression(run, tmp_path / "out", settings_of()).plan()
    with pytest.raises(ConfigError, match="stages of another compression"):
        compression(run, tmp_path / "out", settings_of("2%"))
    (tmp_path / "out" / "compress.json").write_text("{")
    compression(run, tmp_path / "out", settings_of("2%")).plan()  # a damaged record is none


def test_what_cannot_be_cut_is_said(run, tmp_path):
    said = []
    compression(run, tmp_path / "a", settings_of(kinds="ffn,experts"), said).plan()
    assert any(line.startswith("experts stay whole") for line in said)
    with pytest.raises(ConfigError, match="Nothing of this model can be cut"):
        compression(run, tmp_path / "b", settings_of(kinds="experts")).plan()


def test_weights_that_are_not_finite_are_refused(run, tmp_path):
    source = open_to_export(run)
    with torch.no_grad():
        source.model.blocks[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="Weights are not finite"):
        Compression(source, settings_of(), tmp_path, open_to_export, print)


def test_a_cut_whose_loss_is_no_number_is_left_out(run, tmp_path, monkeypatch):
    """It is said with its stage, and is on the page; other cuts are tried. Where all are left out, the error names
    them, and the exit code is that of bad numbers."""

    def overflowing(model, shares, **how):
        made = prune(model, shares, **how)
        if "ffn" in shares:
            made.model.blocks[0].mlp.up_proj.weight.detach()[0, 0] = float("nan")
        return made

    monkeypatch.setattr("tilewright.compress.budget.sensitivity.prune", overflowing)
    said = []
    asked = compression(run, tmp_path / "one", settings_of("90%"), said)
    assert {cut.kind for plan in asked.plan() for cut in plan.cuts} == {"heads"}
    reason = "Held-out loss is not finite (ffn -> 64, before recovery)"
    assert f"ffn -> 64 is left out: {reason}" in said
    row = {"name": "x", "parameters": 1, "rise_before": 0.0, "rise": 0.0, "error": 0.0, "kept": {}, "units": {}}
    row |= {"predicted_speed": 0.9, "speed": 1.0, "seconds": {"predicted": 0.0011, "measured": 0.002}}
    page = render_compression(asked.record | {"recovered": {"x": row | {"domains": asked.record["domains"]}}})
    assert f"Left out: ffn -&gt; 64, whose numbers are not finite: {reason.replace('>', '&gt;')}" in page
    for cell in ("0.90x", "1.00x", "-10 %", "inside", "1.10 ms", "2.00 ms"):
        assert f'<td class="no">{cell}</td>' in page
    with pytest.raises(NumericsError, match="No cut has finite losses") as error:
        compression(run, tmp_path / "all", settings_of(kinds="ffn")).plan()
    assert error.value.exit_code == 4
    assert all(problem.got and problem.need and problem.try_ and problem.where for problem in error.value.problems)


def test_a_recovery_that_diverges_is_left_out_once(run, tmp_path):
    """Its stage is named; the same command does not train it again."""
    source = open_to_export(run)
    source = replace(source, recipe=changed(source.recipe, {"optim.lr": 1e30}))
    said = []
    ask = lambda: Compression(source, settings_of("50%", kinds="ffn", tries=2), tmp_path, open_to_export, said.append)  # noqa: E731
    for _ in range(2):
        with pytest.raises(NumericsError, match="No cut has finite losses") as error:
            ask().run()
        assert "recovered-ffn-32" in error.value.problems[0].got
    assert len([line for line in said if "before recovery" in line]) == len(ask().record["left_out"])


def test_layers_of_their_own_shapes_are_refused_with_what_makes_them_smaller(tmp_path):
    source = SimpleNamespace(model=make_decoder("own_gqa"), recipe=Recipe(), run=tmp_path)
    with pytest.raises(ConfigError, match="Layers of their own shapes are not cut") as error:
        Compression(source, settings_of(), tmp_path, open_to_export, print)
    assert error.value.problems[0].got == "3 layers of 3 shapes (model.layers)"
    assert "tilewright search" in error.value.problems[0].try_


@pytest.mark.parametrize(
    ("section", "values"),
    [("data", {"format": "preferences"}), ("model", {"task": "masked_lm"}), ("lora", {"rank": 4})],
)
def test_other_kinds_of_run_are_refused(section, values, run, tmp_path):
    source = open_to_export(run)
    changed = getattr(source.recipe, section).model_copy(update=values)
    other = replace(source, recipe=source.recipe.model_copy(update={section: changed}))
    with pytest.raises(ConfigError, match="not compressed"):
        Compression(other, settings_of(), tmp_path, open_to_export, print)


def test_a_run_without_held_out_rows_is_refused(run, tmp_path):
    source = open_to_export(run)
    vars(source)["data"] = SimpleNamespace(eval_domains=())
    with pytest.raises(ConfigError, match="No held-out rows") as error:
        Compression(source, settings_of(), tmp_path, open_to_export, print)
    assert all(problem.got and problem.need and problem.try_ for problem in error.value.problems)


def test_the_command_line(run, tmp_path, capsys):
    """A dry run prints what would be tried and trains nothing; a bad budget is refused before the run is opened."""
    out = tmp_path / "out"
    options = ["--cut", "ffn", "--steps", "2", "--out", str(out), "--targets", "hf"]
    assert cli(["compress", str(run), "--budget", "20%", "--dry-run", *options]) == 0
    shown = capsys.readouterr().out
    assert "largest cut first" in shown
    assert "all stages: about " in shown
    assert "ffn-32" in shown
    assert {path.name for path in out.iterdir()} == {".lock", "compress.json"}
    assert cli(["compress", str(run), "--budget", "0%", *options]) == 2
    assert "not above zero" in capsys.readouterr().err
    assert (
        cli(["compress", str(run), "--budget", "0.00000001%", "--dry-run", *options[:-4], "--out", str(out / "b")]) == 3
    )
    assert "No cut is near" in capsys.readouterr().err


def test_a_budget_out_of_reach_names_the_least_cut(run, tmp_path):
    asked = compression(run, tmp_path, settings_of("0.0000001%"))
    cost = {
        "share": 0.5,
        "units": 32,
        "before": 64,
        "rise": 0.1,
        "error": 0.01,
        "saved": 10,
        "speed": 0.9,
        "domains": {},
    }
    asked.record["sensitivity"] = [{"kind": "ffn", **cost}]
    with pytest.raises(FitError, match="No cut is near the loss budget") as error:
        asked.plan()
    assert "alone costs" in error.value.problems[0].got


def recovered(run, out, **changes):
    """A compression whose first cut was recovered, and its row."""
    asked = compression(run, out, settings_of("50%", kinds="ffn", steps=2, tries=1, **changes))
    return asked, asked._recovered(asked.plan()[0])


def test_a_recovered_run_is_trained_for_integers_once(run, tmp_path):
    """A stage of its own: from the recovered weights, with the run as its teacher, and measured as it rounds."""
    asked, best = recovered(run, tmp_path)
    assert best["predicted_speed"] == asked.plan()[0].speed == asked.record["plans"][0]["speed"]
    assert best["seconds"]["measured"] > 0
    assert best["seconds"]["predicted"] == best["predicted_speed"] * asked.record["seconds"]
    row = asked._trained(best, "int8")
    source = open_to_export(tmp_path / row["run"])
    assert [rule.compute for rule in source.recipe.precision.rules] == ["int8"]
    assert source.recipe.distill.teacher == str(run.resolve())
    assert source.trained_in_int8
    rise, _ = row_losses_of(source.as_trained, asked.batches).rise_over(asked.whole)
    assert row["rise"] == rise != row_losses_of(source.model, asked.batches).rise_over(asked.whole)[0]
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "teacher").glob("*.rows")}
    assert asked._trained(best, "int8") == row
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "teacher").glob("*.rows")}


def test_targets_that_missed_by_rounding_are_trained_for():
    targets = find_targets("hf,gguf-q4_0,onnx-int8,executorch-8da4w")
    row = lambda name, rise, inside: {"target": name, "rise": rise, "inside": inside}  # noqa: E731
    rows = [row("hf", 0.2, False), row("gguf-q4_0", 0.2, False), row("onnx-int8", 0.0, True)]
    rows.append(row("executorch-8da4w", None, False))  # it did not run
    assert {name: [t.name for t in found] for name, found in missed(rows, targets).items()} == {"int4": ["gguf-q4_0"]}


@pytest.mark.slow
@pytest.mark.timeout(900)  # consumers in processes of their own
def test_artefacts_that_rounding_took_out_of_the_budget_are_made_again(run, tmp_path, monkeypatch):
    """The same target twice: rounded after recovery, and with the codes that were trained. A second command adds
    nothing."""
    monkeypatch.setattr("tilewright.compress.export_run.BASELINES", ())
    asked, best = recovered(run, tmp_path, targets="onnx-int8")
    asked.settings = replace(asked.settings, budget=-1.0)  # nothing is inside
    asked._export(best)
    rows = asked.record["artefacts"]
    assert [(row["target"], row["integers"], row["state"]) for row in rows] == [
        ("onnx-int8", "", "ran"), ("onnx-int8", "int8", "ran"),
    ]  # fmt: skip
    assert rows[1]["compared_with"] == "the model as trained"
    assert "trained in int8" in render_compression(asked.record | {"chosen": best["name"], "verdict": "over budget"})
    times = [path.stat().st_mtime_ns for path in (tmp_path / "artefacts").iterdir()]
    asked._export(best)
    assert times == [path.stat().st_mtime_ns for path in (tmp_path / "artefacts").iterdir()]


@pytest.mark.slow
@pytest.mark.timeout(900)  # six processes, each with a runtime of its own
def test_a_run_is_compressed_inside_its_budget(run, tmp_path):
    """All stages, controls and a page; a second command finds everything done."""
    out, said = tmp_path / "out", []
    settings = settings_of("50%", targets="fp8", controls="all")
    record = compression(run, out, settings, said).run()
    assert record["verdict"] == "inside budget"
    best = record["recovered"][record["chosen"]]
    assert best["parameters"] < record["parameters"]
    assert read_config(out / best["folder"]).ffn_dim == best["units"]["ffn"][1]
    assert {name.partition("-")[0] for name in record["controls"]} == {"teacher", "alone", "scratch"}
    assert {row["target"]: row["state"] for row in record["artefacts"]} == {"fp8": "ran"}
    times, stages = record["time"], set(record["time"]["predicted"]["stages"])
    ran = {
        "sensitivities",
        "control-teacher",
        "control-alone",
        "control-scratch",
        "exports",
        f"recovered-{record['chosen']}",
    }
    assert ran <= set(times["measured"]) <= stages | {"sensitivities"}
    page = render_compression(record)
    for text in (
        "Map of layers",
        "control: the run itself",
        "Loss by domain",
        "Time of the stages",
        verdict_of(record)[:30].replace(" %", "\u00a0%"),
    ):
        assert text in page
    lines = len(said)
    before = json.loads((out / "compress.json").read_text())
    again = compression(run, out, settings, said)
    assert again.run()["chosen"] == record["chosen"]
    assert len(said) == lines, "a finished stage was done again"
    assert before["recovered"] == json.loads((out / "compress.json").read_text())["recovered"]


@pytest.mark.slow
def test_a_budget_that_is_not_reached_names_the_best(run, tmp_path):
    asked = compression(run, tmp_path, settings_of("0.0000001%", steps=1, tries=1, kinds="ffn", controls="equal"))
    cost = {
        "share": 0.75,
        "units": 32,
        "before": 64,
        "rise": 0.0,
        "error": 0.01,
        "saved": 10,
        "speed": 0.9,
        "domains": {},
    }
    asked.record["sensitivity"] = [{"kind": "ffn", **cost}]
    with pytest.raises(FitError, match="Loss budget was not reached") as error:
        asked.run()
    assert error.value.exit_code == 3
    assert "best ffn-32 after recovery: +" in error.value.problems[0].got
    record = json.loads((tmp_path / "compress.json").read_text())
    assert record["verdict"] == "over budget"
    assert "artefacts" not in record
    assert set(record["controls"]) == {"teacher"}
    assert "was not reached; the best is ffn-32" in render_compression(record)
    control, best = record["controls"]["teacher"], record["recovered"]["ffn-32"]
    assert control["equal_rise"] is None
    assert best["equal_rise"] == pytest.approx((1 + best["rise"]) / (1 + control["rise"]) - 1)  # the same rows
    fair = f"{100 * best['equal_rise']:+.2f} % over the run with as many more steps"
    assert fair in verdict_of(record)
    assert fair in error.value.problems[0].got


@pytest.mark.slow
def test_a_stage_that_was_stopped_goes_on(run, tmp_path):
    """As a signal leaves it: a checkpoint on the way; the same command trains the steps that are left."""
    from tilewright.compress.budget import stage_runs

    source = open_to_export(run)
    stage_runs.write_model(source, source.model, tmp_path / "whole")
    recipe = stage_runs.stage_recipe(source, "part", tmp_path, folder=tmp_path / "whole", taught=True, steps=4)
    first = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 2})})
    folder = stage_runs.run_stage(first, source)
    assert stage_runs.run_stage(recipe, source) == folder
    assert (folder / "checkpoints").is_dir()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        stage_runs.write_model(source, source.model, tmp_path / "file")
