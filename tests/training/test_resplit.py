"""Layers move from a slow rank to a fast one at a checkpoint, and the run is the one that is resumed by hand so."""

import math
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.test_pipeline_run import RUN
from tests.training.tiny import last_state, rows, tiny
from tilewright.planner.machine import ceilings
from tilewright.training.hooks.step_hook import AfterStep, StepHook
from tilewright.training.planning import pace
from tilewright.training.session import train

pytestmark = pytest.mark.dist
SLOW_S = 0.03
STEPS = {"parallel__pp": 2, "model__num_layers": 6, "train__steps": 2000, "train__eval_interval": 0,
         "train__global_batch_size": 4, "checkpoint__interval": 8, "optim__schedule": "constant"}  # fmt: skip


MEASURED = {"pipeline", "counters"}
"""Parts of the state that hold what was measured."""


class Slow(StepHook):
    """Layers of the second rank take longer, whichever they are."""

    def __init__(self, setup, parts):
        for layer in parts.model.layers if setup.world.rank == 1 else ():
            layer.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))


def runs(rank, data, folder):
    """A run that moves its layers, and one that is stopped before and goes on by hand with what the first one chose."""
    ceilings.measure, pace.WORTH_S = fixed_ceilings, math.inf  # this process is the test's own

    def run(name, until, **changes):
        loaded = tiny(Path(data), Path(folder), **RUN | STEPS | {"run__name": name} | changes)
        stop = AfterStep(lambda step, _: signal.raise_signal(signal.SIGTERM) if step.number == until - 1 else None)
        stop.next_step = until - 1  # ranks agree on a stop with the step after
        assert train(loaded, hooks=[Slow, lambda *_: stop]).step == until

    run("moved", 12, parallel__resplit="on")
    split = next(e for e in rows(Path(folder) / "moved" / "events.jsonl") if e["kind"] == "restart")["settings"]
    run("by_hand", 8)
    run("by_hand", 12, parallel__split=str(split["parallel.split"]))
    return split["parallel.split"]


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resplit")
    return folder, on_ranks(2, runs, str(data), str(folder))


@pytest.mark.slow
def test_layers_leave_a_slow_rank_at_a_checkpoint(ran):
    folder, splits = ran
    assert splits[0] == splits[1]
    first, second = splits[0]
    assert first + second == 6
    assert first > second
    restarts = [e for e in rows(folder / "moved" / "events.jsonl") if e["kind"] == "restart"]
    assert [e["step"] for e in restarts] == [8]


@pytest.mark.slow
def test_the_run_is_bit_for_bit_the_one_that_is_resumed_by_hand(ran):
    folder, _ = ran
    (moved, meta), (by_hand, other) = (last_state(folder / name) for name in ("moved", "by_hand"))
    assert moved.keys() == by_hand.keys()
    for name in moved:
        assert torch.equal(moved[name], by_hand[name]), name
    assert meta["rng"] == other["rng"]
    for part in meta["parts"].keys() - MEASURED:
        assert meta["parts"][part] == other["parts"][part], part
    losses = [
        {row["step"]: row["loss"] for row in rows(folder / name / "metrics.jsonl") if "loss" in row}
        for name in ("moved", "by_hand")
    ]
    assert losses[0] == losses[1]
