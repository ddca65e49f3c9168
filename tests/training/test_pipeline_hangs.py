"""A rank of a pipeline that hangs in a pass is named, with the pass, wherever it is in its schedule and whatever the
others have done: ranks run passes in different orders, and who has done fewer may be the one that waits."""

from contextlib import ExitStack

import pytest
import torch

from tests.parallel.pipeline.ragged import decoder, micro_batches
from tests.planner.simulate.here import tables_here
from tilewright.core.config.sections.distill import DistillSection
from tilewright.parallel.liveness.heartbeat import Heartbeat, records
from tilewright.parallel.liveness.rank_failure import Stalls
from tilewright.parallel.pipeline.rank_stages import hold_stages
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import Group, World
from tilewright.training.components.teacher import Teacher
from tilewright.training.hooks.step_hook import Step

LIMIT_S, COUNT = 10.0, 6
PIPELINES = (
    Pipeline(3, "1f1b"),
    Pipeline(3, "gpipe"),
    Pipeline(2, "interleaved", 2),
    Pipeline(2, "interleaved_deferred", 2),
    Pipeline(3, "interleaved_zero_bubble", 2),
    Pipeline(3, "zbv", 2),
    Pipeline(2, "dualpipe_v", 2),
)


@pytest.fixture(scope="module")
def tables():
    return tables_here([(pipeline, COUNT) for pipeline in PIPELINES])


def done_until_one_hangs(rows, hung):
    """Passes of each rank that come to their end while this one does not: each waits for what it needs."""
    stages, done, at = 1 + max(one.stage for row in rows for one in row), set(), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and row[at[rank]] != hung and _ready(row[at[rank]], done, stages):
                done.add((row[at[rank]].stage, row[at[rank]].kind, row[at[rank]].microbatch))
                at[rank], moved = at[rank] + 1, True
    return at


def _ready(one, done, stages):
    stage, kind, number = one
    if kind == "F":
        return stage == 0 or (stage - 1, "F", number) in done
    if kind == "W":
        return (stage, "I", number) in done
    behind = stage == stages - 1 or {(stage + 1, "B", number), (stage + 1, "I", number)} & done
    return (stage, "F", number) in done and bool(behind)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: pipeline.schedule)
def test_whoever_hangs_is_named_with_its_pass(pipeline, tables, tmp_path):
    rows = [[one for slot in row for one in slot] for row in tables[pipeline, COUNT].rows]
    with ExitStack() as beats:
        ranks = [beats.enter_context(Heartbeat(tmp_path, rank, beat_s=1000.0)) for rank in range(len(rows))]
        for step, (victim, hung) in enumerate((rank, one) for rank, row in enumerate(rows) for one in row):
            at = done_until_one_hangs(rows, hung)
            with ExitStack() as passes:
                for rank, heart in enumerate(ranks):
                    heart.at(step + 1, "data")
                    over = passes if at[rank] < len(rows[rank]) else passes.enter_context(ExitStack())
                    tell = over.enter_context(heart.passing())
                    for one in rows[rank][: at[rank]]:
                        with tell(str(one)):
                            heart.phase("forward")  # of memory
                    if rank == victim:
                        over.enter_context(tell(str(hung)))
                    if over is not passes:
                        over.close()
                        heart.phase("update")
                stalls = Stalls(len(rows), LIMIT_S)
                assert stalls.look(records(tmp_path), 0.0) is None
                found = stalls.look(records(tmp_path), LIMIT_S)
                assert found is not None, f"{hung} on rank {victim}: nobody is named"
                record, _ = found
                assert (record.rank, record.phase) == (victim, str(hung)), f"rank {victim} hangs in {hung}"


def test_a_pass_of_a_teacher_is_named(tmp_path):
    """With its micro-batch and stage, as long as it runs; between two of them the rank waits. One rank has both stages
    of a V here; ranks that hang are in `test_rank_hangs`."""
    held, seen = hold_stages(decoder("gqa", 2), Pipeline(1, "zbv", 2), Group(0, 1)), []

    def see(*_):
        (record,) = records(tmp_path).values()
        seen.append((record.phase, record.waiting))

    for stage in held.stages:
        stage.register_forward_pre_hook(see)
        stage.register_forward_hook(see)
    with Heartbeat(tmp_path, 0, beat_s=1000.0) as heart:
        teacher = Teacher(
            lambda: held, DistillSection(teacher="there"), torch.device("cpu"), None, World(heartbeat=heart)
        )
        heart.at(1, "data")
        batches = micro_batches(2, torch.Generator().manual_seed(0))
        teacher.before_step(Step(1, batches, 0.0, None, 0.0, due=False, recorder=None, folder=None))
        (record,) = records(tmp_path).values()
        assert (record.passes, record.waiting) == (0, False), "it is through with them"
    names = [f"teacher's forward of micro-batch {number}, stage {stage}" for number in (1, 2) for stage in (1, 2)]
    assert seen == [(name, False) for name in names for _ in range(2)]
