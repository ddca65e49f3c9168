"""Stragglers: judged from records, with a clock of the test's own."""

import subprocess
import sys
import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tilewright.parallel.liveness.heartbeat import ENDED, RankRecord
from tilewright.parallel.liveness.rank_failure import Stalls
from tilewright.parallel.liveness.repeated_work import Repeat, WorkMeter

LIMIT_S = 10.0


def record(rank, step=3, moves=0, **other):
    return RankRecord(rank, "host0", 100 + rank, step=step, phase="data", moves=moves, **other)


def watched(stalls, ranks, seconds, change=lambda ranks, now: ranks):
    """What is seen each second, while records change."""
    found = []
    for now in range(seconds):
        ranks = change(ranks, now)
        stalled = stalls.look({one.rank: one for one in ranks}, float(now))
        found.append(None if stalled is None else (stalled[0].rank, stalled[1]))
    return found


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=5), st.booleans()
)
def test_the_one_that_is_furthest_behind_is_named_after_the_limit(places, one_ends):
    ranks = [record(rank, step, moves, aside_moves=aside) for rank, (step, moves, aside) in enumerate(places)]
    if one_ends:
        ranks[-1] = replace(ranks[-1], end=ENDED)
    running = [(place, rank) for rank, place in enumerate(places) if not ranks[rank].end]
    (least, worst), furthest = min(running), max(places)
    seen = watched(Stalls(len(ranks), LIMIT_S), ranks, 13)
    assert seen[:10] == [None] * 10
    assert seen[10:] == ([None] * 3 if least == furthest and not one_ends else [(worst, s) for s in (10.0, 11.0, 12.0)])


@given(st.integers(1, 9), st.sampled_from(["moves", "aside_moves", "worked"]))
def test_who_goes_on_now_and_then_is_not(every, what):
    """A phase, one of the thread beside, or work in what takes long."""

    def change(ranks, now):
        behind = ranks[1]
        return [ranks[0], replace(behind, **{what: getattr(behind, what) + 1})] if now % every == 0 else ranks

    seen = watched(Stalls(2, LIMIT_S), [record(0, step=9), record(1)], 60, change)
    assert seen == [None] * 60


def test_a_rank_without_a_record_has_not_begun():
    seen = watched(Stalls(3, LIMIT_S), [record(0, step=0), record(2, step=0)], 12)
    assert seen[9:] == [None, (1, 10.0), (1, 11.0)]


def has_worked(meter):
    """Asked from a thread as the heartbeat's is, whose own work does not count."""
    found = []
    thread = Repeat.Thread(target=lambda: found.append(meter.has_worked()))
    thread.start()
    thread.join()
    return found[0]


def test_a_process_that_computes_or_whose_child_does_works_and_one_that_sleeps_does_not():
    meter = WorkMeter()
    assert has_worked(meter)
    time.sleep(0.5)
    assert not has_worked(meter)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert has_worked(meter)
    spins = "import time\nuntil = time.process_time() + 0.2\nwhile time.process_time() < until: pass\ntime.sleep(200)"
    with subprocess.Popen([sys.executable, "-c", spins]) as child:
        has_worked(meter)
        began = time.monotonic()
        while not has_worked(meter):
            assert time.monotonic() - began < 100
            time.sleep(0.1)
        child.kill()
