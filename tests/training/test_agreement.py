"""What ranks agree on: of a process alone each method returns its argument, of several all find the same."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.ranks import on_ranks
from tilewright.core.errors import ConfigError
from tilewright.core.memory_plan import MemoryPlan
from tilewright.parallel.launch import launched
from tilewright.parallel.mesh import MeshSizes
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.rank_agreement import Agreement, planner_on_first
from tilewright.training.hooks.step_hook import Step
from tilewright.training.runlog.signals import StopRequest

NUMBERS = st.floats(allow_nan=False)
PEAKS = st.dictionaries(st.sampled_from(["forward", "backward", "update"]), st.integers(0, 10**12))


class Placed:
    """An executor with a memory plan, which some refuse."""

    def __init__(self, error=None):
        self.memory_plan, self.error = MemoryPlan.uniform(2), error

    def apply_memory_plan(self, memory_plan):
        if self.error is not None and memory_plan != MemoryPlan.uniform(2):
            raise self.error
        self.memory_plan = memory_plan


@examples(30)
@given(value=NUMBERS, peaks=PEAKS, reason=st.none() | st.text())
def test_a_process_alone_gets_back_what_it_gives(value, peaks, reason):
    one, stop = Agreement(), StopRequest()
    one.begin(stop)
    stop.request(reason)
    assert one.stop.reason == stop.reason, "at once, not after the next step"
    assert (one.most(value), one.least(value), one.worst(peaks)) == (value, value, peaks)
    one.save_due = value > 0
    one.agree()
    assert (one.save_due, one.alone) == (value > 0, True)
    assert one.on_first(lambda: value) == value
    executor, tight = Placed(), MemoryPlan.uniform(2, activations="recompute")
    one.apply(executor, tight)
    assert executor.memory_plan == tight


class Table:
    """Takes the place of the table of ranks."""

    def __init__(self):
        self.told = []

    def begin_step(self, data_s):
        self.told.append(data_s)

    def end_step(self):
        self.told.append("end")

    def rows(self, peak_bytes):
        return [peak_bytes]

    def write(self, step, rows):
        self.told.append((step, rows))


class Beats:
    """Takes the place of a heartbeat."""

    def waits(self): ...

    def works(self): ...


def agree(rank):
    """What a rank finds where it measures its number."""
    with launched(MeshSizes(dp_replicate=2), device="cpu", timeout_s=60) as world:
        messages, stop, result = [], StopRequest(), StepResult(1.0, 1, 1, 1.0, None, 1.0, 1.0)
        agreement = Agreement(replace(world, heartbeat=Beats()), Table(), messages)
        assert not agreement.alone
        agreement.begin(stop)
        step = Step(1, [], 0.1, (100, 300)[rank], 0.5, True, None, None)
        found = [agreement.before_step(one).row_length for one in (step, replace(step, row_length=None))]
        found += [agreement.most(rank), agreement.least(rank), agreement.worst({"forward": 5 - rank, str(rank): 1})]
        agreement.after_step(step, result)
        found += [agreement.stop.reason, agreement.save_due]
        if rank:
            stop.request("asked")
        assert agreement.stop.reason is None, "not before all know"
        agreement.save_due, messages[:] = rank == 0, ["no memory"] * rank
        agreement.after_step(replace(step, memory={"phases": {"forward": 7 + rank}}), result)
        found += [agreement.stop.reason, agreement.save_due, messages, agreement.on_first(lambda: f"of {rank}")]
        assert agreement.table.told == [0.5, 0.5, "end", "end", *([(1, [7])] * (rank == 0))]
        asked = []
        planner = planner_on_first(lambda: asked.append(rank) or divmod, agreement)
        assert asked == [0] * (rank == 0), "made on the first rank alone"
        found.append(planner.__call__(7, 2 + rank))
        assert planner_on_first(lambda: None, agreement) is None
        executor = Placed(ConfigError("no", got="a", need="b", try_="c") if rank else None)
        with pytest.raises(ConfigError):
            agreement.apply(executor, MemoryPlan.uniform(2, activations="recompute"))
        found.append(executor.memory_plan == MemoryPlan.uniform(2))
        return found


@pytest.mark.dist
def test_two_ranks_find_the_same():
    first, second = on_ranks(2, agree)
    assert first == second
    expected = [300, None, 1, 0, {"forward": 5, "0": 1, "1": 1}, None, False]
    assert first == [*expected, "asked (rank 1)", True, ["no memory"], "of 0", (3, 1), True]
