"""Seconds of a compression's stages before anything is trained: of which steps, how many recoveries, what adds up."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compress.budget.compress_settings import CompressSettings
from tilewright.compress.budget.cut_candidates import CutPlan, by_halves
from tilewright.compress.budget.sensitivity import CutCost
from tilewright.compress.budget.stage_seconds import StepPace, pace_of, predicted_seconds
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import DataError
from tilewright.core.hardware import detect_machine

RECIPE = load_recipe(None, {"train.global_batch_size": "8", "train.micro_batch_size": "4"}, environ={}).recipe


def plans_of(speeds):
    return [
        CutPlan((CutCost("ffn", 0.5, number, len(speeds), 0.0, 0.0, 1, speed),)) for number, speed in enumerate(speeds)
    ]


@given(
    speeds=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=9),
    tries=st.integers(1, 8),
    steps=st.integers(1, 500),
    controls=st.sampled_from(["all", "equal", "none"]),
    targets=st.sampled_from(["hf", "int8", "edge4,fp8", "int8,edge4,fp8"]),
    taught=st.booleans(),
    kept=st.booleans(),
)
def test_stages_add_up(speeds, tries, steps, controls, targets, taught, kept):
    """The least is between what the fastest and the slowest cuts would take; training for integers comes on top; more
    steps take longer; no search by halves recovers more cuts than were counted."""
    plans = plans_of(speeds)
    settings = CompressSettings.of("1%", targets, "ffn", steps=steps, tries=tries, controls=controls)
    of = {"cut_s": 3.0, "held_out_s": 0.5, "run_steps": 40, "taught": taught, "reads_kept": kept}
    pace = StepPace(0.25, 2.0, "")
    found = predicted_seconds(plans, settings, pace, **of)
    stages, tried = found["stages"], found["tried"]
    recoveries = [seconds for name, seconds in stages.items() if name.startswith("recovered-")]
    others = sum(s for name, s in stages.items() if name.startswith("control-") or name == "exports")
    teacher = 0.25 * steps / 3 if taught and kept else 0.0
    assert len(recoveries) == len(plans)
    low, high = (others + tried * pick(recoveries) + teacher for pick in (min, max))
    assert low - 1e-6 <= found["least"] <= high + 1e-6
    perhaps = sum(s for name, s in stages.items() if name.startswith(("trained-", "exports-")))
    assert found["most"] == pytest.approx(found["least"] + perhaps)
    more = predicted_seconds(plans, replace(settings, steps=steps + 1), pace, **of)
    assert more["least"] > found["least"]
    names = {"all": {"teacher", "scratch"} | ({"alone"} if taught else set()), "equal": {"teacher"}, "none": set()}
    assert {name.partition("-")[2] for name in stages if name.startswith("control-")} == names[controls]
    called = []
    for largest in range(len(plans) + 1):  # that is inside
        asked = []
        by_halves(
            plans, tries, lambda plan, largest=largest, asked=asked: asked.append(plan) or plans.index(plan) >= largest
        )
        called.append(len(asked))
    assert max(called) == tried


class Doubled(torch.nn.Module):
    """A model whose every pass is counted."""

    task = "causal_lm"

    def __init__(self):
        super().__init__()
        self.weight, self.passes = torch.nn.Parameter(torch.ones(2)), 0

    def loss(self, batch):
        self.passes += 1
        return SimpleNamespace(loss_sum=2 * self.weight.sum())


def source_of(run, recipe=RECIPE):
    return SimpleNamespace(run=run, recipe=recipe, model=Doubled())


def run_folder(folder, lines, **other):
    """A run with these rows, on this machine but for what was other there."""
    folder.mkdir()
    (folder / "run.toml").write_text("[train]\nglobal_batch_size = 8\nmicro_batch_size = 4\n")
    (folder / "machine.json").write_text(json.dumps(detect_machine("cpu").to_json() | other))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


ROWS = [json.dumps({"step": number, "step_s": 9.0 if number == 1 else 0.5}) for number in range(1, 8)]
BATCH = {"labels": torch.zeros(4, 3)}


def test_steps_of_the_run_are_those_of_its_stages(tmp_path):
    """Evaluations, which have no seconds of a step, and a line that a kill has cut short are left out."""
    run = run_folder(tmp_path / "run", [*ROWS, '{"step": 7, "eval": {}}', '{"step": 8, "ste'])
    source = source_of(run)
    assert pace_of(source, BATCH) == StepPace(0.5, 9.0, "the last 6 steps of the run")
    assert not source.model.passes


ELSEWHERE = {
    "another CPU": {"device_name": "another"},
    "other instructions": {"cpu_features": ["avx2", "fma"]},
    "other cores": {"physical_cores": 64},
    "a share of a core": {"core_share": 0.25},
}


@pytest.mark.parametrize("why", ["no run", "no steps", "other settings", *ELSEWHERE])
def test_steps_are_measured_where_the_run_says_nothing_of_them(why, tmp_path):
    """Passes of a micro-batch of 4 rows, twice for a step of 8; no gradient stays."""
    lines = [] if why == "no steps" else ROWS
    run = run_folder(tmp_path / "run", lines, **ELSEWHERE.get(why, {}))
    source = source_of(tmp_path if why == "no run" else run)
    if why == "other settings":
        source.recipe = changed(RECIPE, {"train.global_batch_size": 16})
    pace = pace_of(source, BATCH)
    assert pace.how == "forward and backward passes here, in FP32"
    assert 0 < pace.step_s == pace.first_s < 10
    assert source.model.passes == 3
    assert source.model.weight.grad is None


def test_a_damaged_machine_file_is_named(tmp_path):
    run = run_folder(tmp_path / "run", ROWS)
    (run / "machine.json").write_text("{")
    with pytest.raises(DataError) as error:
        pace_of(source_of(run), BATCH)
    assert "machine.json" in str(error.value)
