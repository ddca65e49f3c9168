"""One of two ranks sleeps in a phase of a run: the other one waits as long as it may, names it, and both end."""

import os
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from torch.distributed.pipelining import PipelineStage

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks, started
from tests.training.test_pipeline_run import runs
from tests.training.tiny import tiny
from tilewright.core.errors import TilewrightError
from tilewright.data.batches.stream import Stream
from tilewright.models.decoder.decoder import Decoder
from tilewright.parallel.liveness import heartbeat
from tilewright.parallel.liveness.heartbeat import records
from tilewright.parallel.pipeline.stage_base import ModelStage
from tilewright.planner.machine import ceilings
from tilewright.training import assemble, run, session
from tilewright.training.checkpoint import write_checkpoint
from tilewright.training.planning import rank_watch

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]
LIMIT_S, SECONDS = 12, 60
"""`parallel.timeout_minutes`, in seconds; and in how many both ranks have ended since one fell asleep."""
SHARDS, COPIES = {"parallel__dp_shard": 2}, {"parallel__dp_replicate": 2, "parallel__dp_shard": 1}
STAGES = {"parallel__pp": 2, "data__rows": "documents", "parallel__schedule": "gpipe", "parallel__balance": "on"}
TAUGHT = {"parallel__pp": 2, "train__micro_batch_size": 2, "distill__teacher": "taught_by"}
DRY = {"dry_run": True}
SAVE = {"train__steps": 4, "checkpoint__interval": 2, "checkpoint__async_save": "false"}


def sleeping(owner, name, calls, mark):
    """Let a function sleep from its n-th call on; when that began is in a file."""
    before, seen = getattr(owner, name), []

    def sleeps(*args, **named):
        seen.append(1)
        if len(seen) >= calls:
            mark.write_text(str(time.monotonic()))
            time.sleep(600)
        return before(*args, **named)

    setattr(owner, name, sleeps)  # this process is the test's own


PHASES = {
    "launch": (1, session, "launched", 1, COPIES, "start of the run: recipe and versions"),
    "folder": (0, session, "open_folder", 1, COPIES, "start of the run: the run folder"),
    "watch": (1, rank_watch, "Heartbeat", 1, COPIES, "hangs in start, before its first sign of life"),
    "data of the run": (0, assemble, "prepare_data", 1, COPIES, "hangs in data preparation"),
    "plan": (0, assemble, "plan_run", 1, COPIES, "hangs in planning"),
    "restore": (1, session, "restore", 1, SHARDS, "hangs in restore"),
    "data": (1, Stream, "next_step", 2, SHARDS, "hangs in step 2, data"),
    "forward": (1, Decoder, "loss", 3, SHARDS, "hangs in step 2, forward"),
    "forward of copies": (1, Decoder, "loss", 3, COPIES, "hangs in step 2, forward"),
    "evaluate": (1, run, "evaluate_texts", 1, SHARDS | {"train__eval_interval": 1}, "hangs in step 2, evaluate"),
    "save": (1, write_checkpoint._Writer, "write_data", 1, SHARDS | SAVE, "hangs in step 3, save"),
    "save beside": (
        1,
        write_checkpoint._Writer,
        "write_data",
        1,
        COPIES | SAVE | {"checkpoint__async_save": "true"},
        "save",
    ),
    "pass": (1, PipelineStage, "backward_one_chunk", 2, STAGES, "hangs in step 1, backward of micro-batch 2, stage 2"),
    "first pass": (
        0,
        PipelineStage,
        "forward_one_chunk",
        1,
        STAGES,
        "hangs in step 1, forward of micro-batch 1, stage 1",
    ),
    "dry data": (0, assemble, "prepare_data", 1, COPIES | DRY, "hangs in data preparation"),
    "dry batches": (1, Stream, "next_step", 2, SHARDS | DRY, "hangs in data of step 2"),
    "dry forward": (0, Decoder, "loss", 1, SHARDS | DRY, "hangs in forward"),
    "sample": (1, run, "run_samples", 1, COPIES | {"train__steps": 2}, "hangs in step 3, samples"),
    "teacher": (1, ModelStage, "forward", 2, TAUGHT, "hangs in step 1, teacher's forward of micro-batch 2, stage 2"),
}
"""Who sleeps, in which call of what, in which run, and what is said of it."""
SOON = ("launch", "data", "pass")
"""Of the tests that run by default."""
LATER = ("teacher",), tuple(name for name in PHASES if name != "teacher")


def main(number, phases, data, runs):
    """One rank of a pair; what it ended with, and when."""
    pair, rank = divmod(number, 2)
    name = phases[pair]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(pair)  # its part of the store
    ceilings.measure = fixed_ceilings
    victim, owner, function, calls, changes, _ = PHASES[name]
    if rank == victim:
        sleeping(owner, function, calls, Path(runs) / f"{name}.txt")
    tempfile.tempdir = str(Path(runs) / name)  # where ranks without a run folder have their records
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    changes = {"train__steps": 3, "parallel__timeout_minutes": LIMIT_S / 60, "train__sample_tokens": 2} | changes
    if teacher := changes.get("distill__teacher"):
        changes |= {"distill__teacher": str(Path(runs) / teacher)}
    dry = changes.pop("dry_run", False)
    try:
        session.train(tiny(Path(data), Path(runs) / name, **changes), dry_run=dry)
    except TilewrightError as error:
        return str(error)
    return ""


def ended(phases, data, runs):
    """What the rank of each pair that does not sleep said, and seconds since the other one fell asleep."""
    with started(2 * len(phases), main, phases, str(data), str(runs), group=False) as (_, ends):
        until, found = time.monotonic() + 2 * SECONDS, {}
        left = {ends[2 * pair + 1 - PHASES[name][0]]: name for pair, name in enumerate(phases)}
        while left:
            ready = wait(list(left), timeout=max(0.0, until - time.monotonic()))
            assert ready, f"{sorted(left.values())}: still waits"
            for end in ready:
                name = left.pop(end)
                began = float((runs / f"{name}.txt").read_text())
                found[name] = _said(end, runs / name), time.monotonic() - began
                if not found[name][0]:  # it came to its end: the one that sleeps ends itself
                    left[ends[2 * phases.index(name) + PHASES[name][0]]] = name
    return found


def _said(end, folder):
    """The error that a rank sent; where a thread ended it, what the ranks have written down."""
    try:
        _, said = end.recv()
        return said
    except EOFError:
        kept = [path.parent for path in folder.rglob(heartbeat.FOLDER)]
        return " ".join(record.end for path in kept for record in records(path).values())


@pytest.mark.parametrize(
    "phases", [SOON, *(pytest.param(one, marks=pytest.mark.slow) for one in LATER)], ids=["soon", "teacher", "others"]
)
@pytest.mark.support("hangs", "copies", "shards", "stages")
def test_who_hangs_is_named_and_all_end(phases, data, tmp_path):
    if "teacher" in phases:
        on_ranks(1, runs, str(data), str(tmp_path), {"taught_by": {"train__steps": 1}})
    for name, (said, seconds) in ended(phases, data, tmp_path).items():
        print(f"{name}: {seconds:.0f} s")
        assert PHASES[name][-1] in said, f"{name}: {said}"
        assert f"Rank {PHASES[name][0]} of 2" in said, name
        assert seconds <= SECONDS, name
