"""A rank of a pipeline that hangs in a pass is named, with the pass, wherever it is in its schedule and whatever the
others have done: ranks run passes in different orders, and who has done fewer may be the one that waits."""

from contextlib import ExitStack

import pytest

from tests.planner.simulate.here import tables_here
from tilewright.parallel.liveness.failure import Stalls
from tilewright.parallel.liveness.heartbeat import Heartbeat, records
from tilewright.parallel.pipeline.split import Pipeline

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
