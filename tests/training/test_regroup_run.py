"""Whole runs whose memory changes while they continue: the same files of numbers as a run whose memory does not."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.report.test_page import outline
from tests.training.out_of_memory import Allocator
from tests.training.tiny import assert_same_run, rows, tiny
from tilewright.core.errors import FitError
from tilewright.optim.adam import DeepSeekAdam
from tilewright.planner.replan import Replanner
from tilewright.report.page import write_report
from tilewright.training.executor.layer_major import LayerMajorExecutor
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.executor.step_transaction import PartialUpdateError
from tilewright.training.hooks.replan_setup import LOOK_S, MemoryWatch, there_bytes
from tilewright.training.session import train

CASES = {
    "standard": {"model__num_experts": 4},
    "fp8": {"precision__mode": "fp8_tile", "optim__moments": "8bit"},
    "layer_major": {"memory__executor": "layer_major", "memory__offload_activations": "disk"},
    "delayed": {"memory__executor": "layer_major", "optim__clip": "delayed", "memory__offload_optimizer": "disk"},
}


def failing_at(monkeypatch, step, places):
    """In the step of this number some allocations find no memory; failures that were met."""
    met = []
    for which in (StandardExecutor, LayerMajorExecutor):
        real, calls = which.step, []

        def failing(self, microbatches, lr, real=real, calls=calls):
            calls.append(None)
            with Allocator(places if len(calls) == step else ()) as allocator:
                try:
                    return real(self, microbatches, lr)
                finally:
                    met.extend(allocator.failed)

        monkeypatch.setattr(which, "step", failing)
    return met


@pytest.mark.parametrize(
    "case", ["layer_major", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "layer_major")]
)
def test_a_run_with_an_out_of_memory_is_the_run_without(case, data, tmp_path, monkeypatch):
    train(tiny(data, tmp_path / "plain", **CASES[case]))
    with monkeypatch.context() as patch:
        met = failing_at(patch, 5, [random.Random(case).randrange(100, 900)])
        train(tiny(data, tmp_path / "failed", **CASES[case]))
    assert len(met) == 1
    run = tmp_path / "failed" / "tiny"
    assert_same_run(run, tmp_path / "plain" / "tiny", matmuls=False)
    told = [row for row in rows(run / "events.jsonl") if row["kind"] == "replan" and row["trigger"] == "out_of_memory"]
    assert len(told) == 1
    assert told[0]["step"] == 5
    assert "can't allocate memory" in told[0]["message"] or "CUDA out of memory" in told[0]["message"]


def test_a_step_that_could_not_be_finished_stops_the_run(data, tmp_path, monkeypatch):
    """No memory from the second update of step 5 on: the checkpoint stays, and the run continues from it."""
    case = CASES["layer_major"] | {"checkpoint__interval": 3}
    train(tiny(data, tmp_path / "plain", **case))
    real, calls = DeepSeekAdam.step_params, []

    def step_params(self, params, grads=None):
        step = int(self.state[params[0]]["step"]) if params else 0
        calls.append(step)
        if calls.count(4) > 1:
            raise MemoryError
        real(self, params, grads)

    with monkeypatch.context() as patch:
        patch.setattr(DeepSeekAdam, "step_params", step_params)
        with pytest.raises(PartialUpdateError, match="Out of memory during the optimizer update; the retry failed"):
            train(tiny(data, tmp_path / "failed", **case))
    run = tmp_path / "failed" / "tiny"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000003"]
    assert rows(run / "events.jsonl")[-1]["kind"] == "stop"
    train(tiny(data, tmp_path / "failed", **case))
    assert_same_run(run, tmp_path / "plain" / "tiny")


def test_without_a_plan_a_step_is_computed_again_and_nothing_else(data, tmp_path, monkeypatch):
    failing_at(monkeypatch, 5, [300])
    train(tiny(data, tmp_path, memory__plan=""))
    (told,) = [row for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "replan"]
    assert told["step"] == 5
    assert "there is no tighter memory plan" in told["message"]
    assert "after" not in told


def test_a_run_far_from_its_budget_asks_no_planner_and_prints_nothing_of_it(data, tmp_path, monkeypatch, capsys):
    def asked(*_, **__):
        raise AssertionError("a planner was made")

    monkeypatch.setattr(Replanner, "__init__", asked)
    train(tiny(data, tmp_path))
    events = [row for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "replan"]
    assert events[0]["trigger"] == "calibration"
    assert events[0]["threshold"] == 0.05
    assert "replan" not in capsys.readouterr().out


def test_what_a_run_may_use():
    now = [0.0]
    watch = MemoryWatch(10**15, torch.device("cpu"), 7, clock=lambda: now[0])
    first = watch()
    assert first == pytest.approx(there_bytes(torch.device("cpu")), rel=0.2)
    block = torch.ones(2**28, dtype=torch.uint8)
    assert watch() == first  # asked again only after a second
    now[0] += LOOK_S
    assert watch() == pytest.approx(first, rel=0.2)  # what this process takes is its own
    del block
    assert MemoryWatch(1000, torch.device("cpu"))() == 1000.0


def test_the_report_shows_what_was_decided(data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing_at(patch, 5, [300])
        train(tiny(data, tmp_path))
    path = write_report(tmp_path / "tiny")
    page = outline(path.read_text())
    text = " ".join(" ".join(page.text).split())
    assert "Plans made while the run continued" in text
    assert "out of memory" in text
    assert "1 with another memory plan" in text
    assert re.search(r"-10\.0% 2 keep (2 \w+|1 \w+, 1 \w+) ", text), "less is kept of the layers, on any machine"


BIG = {
    "model__dim": 128,
    "model__num_layers": 8,
    "model__num_heads": 4,
    "data__seq_len": 512,
    "train__global_batch_size": 8,
    "train__micro_batch_size": 8,
    "train__steps": 5,
    "train__eval_interval": 0,
    "train__sample_tokens": 0,
    "checkpoint__interval": 0,
    "plan__device_memory": "1200MiB",
    "train__log_interval": 1,
}


CUT = """
import json, sys
from pathlib import Path
from tests.training.tiny import tiny
from tilewright.training.hooks import replan_setup
from tilewright.training.session import train

class Cut(replan_setup.MemoryWatch):
    step = 0

    def __call__(self):
        return self.limit * (0.7 if self.step >= 3 else 1.0)

class Watching(replan_setup.AdaptiveReplanner):
    def before_step(self, step):
        Cut.step = step.number
        return super().before_step(step)

if sys.argv[3] == "cut":
    replan_setup.MemoryWatch, replan_setup.AdaptiveReplanner = Cut, Watching
train(tiny(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[4])))
"""
"""In a process of its own, because what a process holds besides counts on a CPU."""


@pytest.mark.slow
def test_a_budget_cut_by_30_percent_in_mid_run(data, tmp_path):
    """With the real planner: the run keeps within what it may use from then on, and its losses are the same bits."""
    for how in ("plain", "cut"):
        arguments = [str(data), str(tmp_path / how), how, json.dumps(BIG)]
        subprocess.run([sys.executable, "-c", CUT, *arguments], check=True, cwd=Path(__file__).parents[2])
    plain, cut = tmp_path / "plain" / "tiny", tmp_path / "cut" / "tiny"
    losses = [[row["loss"] for row in rows(run / "metrics.jsonl") if "loss" in row] for run in (plain, cut)]
    assert losses[0] == losses[1]
    events = [row for row in rows(cut / "events.jsonl") if row["kind"] == "replan" and row["trigger"] == "budget"]
    assert len(events) == 1, json.dumps(events)
    assert events[0]["change"] == pytest.approx(-0.3)
    assert events[0]["before"] == "8 keep"
    last = [row for row in rows(cut / "metrics.jsonl") if "memory_phases" in row][-1]
    step_peak = max(sum(last["memory_phases"][name].values()) for name in ("forward", "backward", "update"))
    assert step_peak <= 1.05 * 0.7 * 1200 * 2**20


def test_no_memory_under_any_placement(data, tmp_path, monkeypatch):
    failing_at(monkeypatch, 5, range(100_000))
    real = StandardExecutor.step
    monkeypatch.setattr(StandardExecutor, "step", lambda self, *args: _until(real, self, args))
    with pytest.raises(FitError) as caught:
        train(tiny(data, tmp_path))
    assert len(caught.value.problems[0].try_.splitlines()) == 3


def _until(real, executor, args):
    state = next(iter(executor.optimizer.state.values()), None)
    if state is not None and int(state["step"]) == 4:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return real(executor, *args)
