"""What one rank alone sees is acted on by all: a signal, minutes, memory, an allocator's error, a folder that is
gone."""

import signal
from pathlib import Path

import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import rows, tiny
from tilewright.core.errors import TilewrightError
from tilewright.models.decoder.decoder import Decoder
from tilewright.planner.machine import ceilings
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.hooks import replan_setup
from tilewright.training.run import Run
from tilewright.training.session import train

pytestmark = pytest.mark.dist
MESHES = {"copies": {"parallel__dp_replicate": 2, "parallel__dp_shard": 1}, "shards": {"parallel__dp_shard": 2}}


class Plans:
    """The memory plan of each step, as this rank's executor ran it."""

    def __init__(self):
        self.seen = []
        before = StandardExecutor.step

        def step(executor, *args):
            result = before(executor, *args)
            self.seen.append(str(executor.memory_plan))
            return result

        StandardExecutor.step = step  # this process is the test's own


def at_step(number, work):
    """Do `work` before the batches of a step (counted from 1) are drawn."""
    before = Run._step

    def step(run):
        if run.step + 1 == number:
            work(run)
        before(run)

    Run._step = step


def rank_main(rank, data, runs, changes, what):
    ceilings.measure = fixed_ceilings
    plans = Plans()
    if rank == 1:
        PLANTS[what]()
    try:
        result = train(tiny(Path(data), Path(runs), **changes))
    except TilewrightError as error:
        return type(error).__name__, str(error), plans.seen
    return result.step, result.stopped, plans.seen


def _stop():
    at_step(3, lambda run: signal.raise_signal(signal.SIGTERM))


def _minutes():
    at_step(3, lambda run: setattr(run, "_saved_at", -1e9))


def _memory():
    real = replan_setup.there_bytes
    less = []
    replan_setup.there_bytes = lambda *args: 1000 if less else real(*args)
    replan_setup.LOOK_S = 0.0
    at_step(4, lambda run: less.append(1))


def _oom():
    before, tries = Decoder.loss, []

    def loss(model, batch):
        if model.training:
            tries.append(1)
            if len(tries) == 5:
                raise torch.OutOfMemoryError("planted: no memory")
        return before(model, batch)

    Decoder.loss = loss


PLANTS = {"stop": _stop, "minutes": _minutes, "memory": _memory, "oom": _oom, "nothing": lambda: None}


def on_two(data, runs, mesh, what, **changes):
    settings = {"checkpoint__interval": 0, "train__steps": 6, "train__eval_interval": 0}
    return on_ranks(2, rank_main, str(data), str(runs), settings | MESHES[mesh] | changes, what)


@pytest.mark.parametrize("mesh", [pytest.param("copies", marks=pytest.mark.slow), "shards"])
@pytest.mark.support("signal", "copies", "shards")
def test_a_signal(mesh, data, tmp_path):
    found = on_two(data, tmp_path, mesh, "stop")
    assert [one[:2] for one in found] == [(3, "SIGTERM (rank 1)")] * 2
    assert (tmp_path / "tiny" / "checkpoints" / "step_00000003").is_dir()


@pytest.mark.slow
def test_minutes_that_have_passed(data, tmp_path):
    found = on_two(data, tmp_path, "copies", "minutes")
    assert [one[0] for one in found] == [6, 6]
    saved = [row["step"] for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "save"]
    assert saved == [3, 6]


@pytest.mark.slow
def test_memory_that_is_short(data, tmp_path):
    found = on_two(data, tmp_path, "copies", "memory")
    assert [one[0] for one in found] == [6, 6]
    assert found[0][2] == found[1][2]
    replans = [row for row in rows(tmp_path / "tiny" / "events.jsonl") if row.get("trigger") == "budget"]
    assert replans
    assert replans[0]["budget_bytes"] < 1e9


@pytest.mark.support("memory", "copies")
def test_an_allocator_that_finds_nothing(data, tmp_path):
    straight = on_two(data, tmp_path / "straight", "copies", "nothing")
    found = on_two(data, tmp_path / "oom", "copies", "oom")
    assert [one[0] for one in found] == [one[0] for one in straight] == [6, 6]
    assert found[0][2] == found[1][2]
    losses = [
        [row["loss"] for row in rows(tmp_path / name / "tiny" / "metrics.jsonl") if "loss" in row]
        for name in ("straight", "oom")
    ]
    assert losses[0] == losses[1]
    events = [row for row in rows(tmp_path / "oom" / "tiny" / "events.jsonl") if row.get("trigger") == "out_of_memory"]
    assert len(events) == 1


def gone(rank, data, runs, changes):
    ceilings.measure = fixed_ceilings
    if rank == 1:
        at_step(3, lambda run: run.folder.path.rename(run.folder.path.with_name("moved")))
    try:
        train(tiny(Path(data), Path(runs), **changes))
    except TilewrightError as error:
        return str(error)
    return "no error"


def test_a_folder_that_is_gone(data, tmp_path):
    changes = MESHES["copies"] | {"checkpoint__interval": 0, "train__log_interval": 1, "train__steps": 8}
    first, second = on_ranks(2, gone, str(data), str(tmp_path), changes)
    assert first == second
    assert "Run folder was deleted or moved" in first
