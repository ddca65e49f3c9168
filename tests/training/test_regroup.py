"""When a run plans again, what it does then, and what it says: with an executor and a planner that are played."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations_with_replacement
from operator import attrgetter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import ConfigError
from tilewright.core.memory_plan import LayerMemory, MemoryPlan
from tilewright.data.batches.microbatches import row_length
from tilewright.training.executor.base import StepResult
from tilewright.training.executor.step_transaction import PartialUpdateError, partial_update, run_with_retries
from tilewright.training.hooks.adaptive_replanner import AdaptiveReplanner
from tilewright.training.hooks.step_hook import Step
from tilewright.training.planning.describe_memory_plan import tighter, words

LAYERS = 4
KEPT = {"keep": 100.0, "selective": 60.0, "attention": 30.0, "recompute": 20.0}
SECONDS = {"keep": 1.0, "selective": 1.1, "attention": 1.3, "recompute": 1.4}
BASE = 200.0
KEEP = MemoryPlan.uniform(LAYERS)
PEAK = attrgetter("step_bytes")
KINDS = tuple(LayerMemory(activations=kind) for kind in KEPT if kind != "attention")


@dataclass(frozen=True)
class Played:
    """What the hook reads of a plan."""

    memory_plan: MemoryPlan
    phases: dict[str, dict[str, float]]
    step_s: float

    @property
    def step_bytes(self) -> float:
        return max(sum(owners.values()) for name, owners in self.phases.items() if name != "load")


class PlayedPlanner:
    """Bytes of a base and of what layers keep, which grows with the rows' length."""

    def __init__(self, num_layers=LAYERS, kinds=KINDS) -> None:
        self.asked = []
        self.num_layers = num_layers
        self.kinds = kinds

    def predict(self, memory_plan, seq_len=None, *, memory_factor=1.0, time_factor=1.0):
        longer = (seq_len or 512) / 512
        kept = sum(KEPT[layer.activations] for layer in memory_plan.layers if layer.inputs == "device") * longer
        phases = {"load": {"parameters": 10.0}, "forward": {"parameters": BASE * memory_factor}}
        phases["backward"] = {"parameters": BASE * memory_factor, "activations": kept * memory_factor}
        seconds = sum(SECONDS[one.activations] + (one.inputs != "device") for one in memory_plan.layers)
        return Played(memory_plan, phases, seconds * time_factor)

    def _all(self, seq_len, factors):
        for layers in combinations_with_replacement(self.kinds, self.num_layers):
            yield self.predict(MemoryPlan(layers=layers), seq_len, **factors)

    def plan(self, device_bytes, seq_len=None, **factors):
        self.asked.append((device_bytes, seq_len))
        fitting = [one for one in self._all(seq_len, factors) if PEAK(one) <= device_bytes]
        return min(fitting, key=lambda one: one.step_s, default=None)

    def smallest(self, seq_len=None, *, memory_factor=1.0):
        return min(self._all(seq_len, {"memory_factor": memory_factor}), key=PEAK)


@dataclass
class PlayedWhole:
    oom_messages: list = field(default_factory=list)
    freed: int = 0

    def free_memory(self):
        self.freed += 1


class PlayedExecutor:
    """Takes what its memory plan takes on a machine that differs from the plan by a factor."""

    def __init__(self, memory_plan=KEEP, *, factor=1.0) -> None:
        self.memory_plan = memory_plan
        self.transaction = PlayedWhole()
        self.factor = factor
        self.trouble: list[BaseException | Callable] = []
        self.steps = 0
        self.refuses = False
        self.length = 512
        self._planner = PlayedPlanner()

    def step(self, microbatches, lr):
        self.length = row_length(microbatches)
        if self.trouble:
            trouble = self.trouble.pop(0)
            if isinstance(trouble, BaseException):
                raise trouble
            trouble()
        self.steps += 1
        seconds = self._planner.predict(self.memory_plan, self.length).step_s * 2
        return StepResult(1.0, 1, 1, 1.0, None, 1.0, seconds)

    def apply_memory_plan(self, memory_plan):
        if self.refuses:
            raise ConfigError("It does not go.", got="a", need="b", try_="c")
        self.memory_plan = memory_plan

    def peaks(self):
        return {
            "backward": int(PEAK(self._planner.predict(self.memory_plan, self.length)) * self.factor),
            "load": 9999,
        }


@dataclass
class PlayedTracker:
    """Of one process."""

    take_peaks: Callable


@dataclass
class Play:
    executor: PlayedExecutor
    planner: PlayedPlanner | None = field(default_factory=PlayedPlanner)
    budget: float = 1e6
    events: list = field(default_factory=list)
    number: int = 0
    ladder: tuple = ("selective", "recompute")
    growth: float = 0.0

    def __post_init__(self):
        self.replanner = AdaptiveReplanner(
            self.executor,
            lambda: self.planner,
            PlayedTracker(self.executor.peaks),
            lambda: self.budget,
            lambda step, text, **numbers: self.events.append((step, text, numbers)),
            steps=1000,
            ladder=self.ladder,
            growth=self.growth,
        )

    def step(self, length=512):
        self.number += 1
        return looked_at(self.replanner, self.number, [{"input_ids": torch.zeros(1, length, dtype=torch.int64)}], 0.1)

    def triggers(self):
        return [numbers["trigger"] for _, _, numbers in self.events]


def looked_at(replanner, number, microbatches, lr):
    """A step as the training loop takes it where it looks at every one."""
    step = Step(number, microbatches, lr, row_length(microbatches), 0.0, False, None, None)
    replanner.before_step(step)
    result = run_with_retries(
        partial(replanner.executor.step, microbatches, lr), partial(replanner.reduce_memory, number)
    )
    replanner.after_step(step, result)
    return result


def watches(play):
    """Whether the next step is looked at in any case."""
    return play.replanner.next_step == 0


def no_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def test_a_run_that_goes_as_planned_says_so_once():
    play = Play(PlayedExecutor())
    for _ in range(5):
        play.step()
    ((step, text, numbers),) = play.events
    assert (step, numbers["trigger"], numbers["error"], numbers["threshold"]) == (2, "calibration", 0.0, 0.05)
    assert "600 B measured, 600 B expected: +0.0%, within 5%" in text
    assert play.planner.asked == []
    assert play.executor.memory_plan == KEEP


@given(factor=st.floats(0.9, 1.05), growth=st.sampled_from([0.0, 0.03]))
def test_what_is_said_to_be_within_the_threshold_is(factor, growth):
    """Of a step that took less than expected, where later ones take more: both numbers are said."""
    play = Play(PlayedExecutor(factor=factor), growth=growth)
    for _ in range(2):
        play.step()
    ((_, text, numbers),) = play.events
    error = numbers["error"]
    grown = "within 5% with the 3% more that later steps take" in text
    assert ("within 5%" in text) is ((1 + error) * (1 + growth) >= 0.95 and error <= 0.05)
    assert grown is ("within 5%" in text and error < -0.05)
    assert ("threshold 5%" in text) is ("within 5%" not in text)


def test_the_second_step_corrects_every_later_plan():
    """The machine takes a quarter more than planned: what fitted on paper does not. The first step compiles."""
    play = Play(PlayedExecutor(factor=1.25), budget=700.0)
    assert play.replanner.expected is None
    play.step()
    assert play.events == []
    play.step()
    assert play.replanner.memory_factor == 1.25
    assert play.triggers() == ["calibration"]
    assert "+25.0% (threshold 5%)" in play.events[0][1]
    assert "from 4 keep to" in play.events[0][1]
    assert play.executor._planner.predict(play.executor.memory_plan).phases["backward"]["activations"] * 1.25 <= 450
    play.step()
    play.step()
    assert len(play.events) == 1  # as expected from here on
    assert play.replanner.peak_bytes == pytest.approx(play.executor.peaks()["backward"], rel=0.01)
    assert play.replanner.time_factor == 2.0


@pytest.mark.parametrize("budget", [610.0, 640.0])
def test_a_step_that_takes_more_than_the_run_may_use_is_planned_again(budget):
    """Also where it is within the 5 % of what was expected."""
    play = Play(PlayedExecutor(factor=1.03), budget=budget)
    for _ in range(4):
        play.step()
    assert play.executor.peaks()["backward"] <= budget
    if budget > 618:
        assert play.executor.memory_plan == KEEP
        return
    (text,) = [text for _, text, _ in play.events if "multiplied" in text]
    assert "618 B measured, 600 B expected: +3.0% (threshold 1%)" in text
    assert "from 4 keep to" in text


@pytest.mark.parametrize(("budget", "near"), [(700.0, True), (1000.0, False)])
def test_a_run_far_from_its_budget_is_neither_watched_nor_talked_of(budget, near):
    play = Play(PlayedExecutor(factor=1.07), budget=budget)
    assert watches(play)
    play.step()
    assert watches(play), "the second step settles what is expected"
    play.step()
    assert watches(play) == near
    assert [numbers["shown"] for _, _, numbers in play.events] == [near]


def test_a_change_of_placement_is_always_shown_and_watched():
    play = Play(PlayedExecutor(), budget=10_000.0)
    play.step()
    play.step()
    assert not watches(play)
    play.executor.trouble = [no_memory()]
    assert play.replanner.reduce_memory(3, "no memory")
    assert watches(play)
    assert play.events[-1][2]["shown"]
    play.step(512)
    play.budget = 620.0
    play.step(2048)
    assert play.events[-1][2]["shown"]


def test_less_than_planned_makes_room_where_it_pays():
    tight = MemoryPlan.uniform(LAYERS, activations="recompute")
    play = Play(PlayedExecutor(tight, factor=0.5), budget=300.0)
    play.step()
    assert play.executor.memory_plan == tight, (
        "the first step's allocator may have had more free blocks than later ones"
    )
    play.step()
    assert play.executor.memory_plan == KEEP
    play = Play(PlayedExecutor(tight, factor=0.5), budget=300.0)
    play.replanner._steps = 2  # none is left: a change would not pay
    play.step()
    play.step()
    assert play.executor.memory_plan == tight
    assert "does not pay" in play.events[0][1]


def test_longer_rows_and_shorter_ones_again():
    play = Play(PlayedExecutor(), budget=700.0)
    for length in (512, 512, 2048, 2048, 512, 512):
        play.step(length)
    assert play.triggers() == ["calibration", "shape", "shape"]
    assert "rows of 2048 tokens, before 512: from 4 keep to 1 selective, 3 recompute" not in play.events[0][1]
    assert "rows of 2048 tokens, before 512: from 4 keep to" in play.events[1][1]
    assert [numbers["budget_bytes"] for _, _, numbers in play.events[1:]] == [700.0, 700.0]
    assert play.executor.memory_plan == KEEP
    assert play.planner.asked == [(700.0, 2048), (700.0, 512)]


def test_a_budget_cut_by_a_third_and_given_back():
    play = Play(PlayedExecutor(), budget=650.0)
    play.step()
    play.budget = 650.0 * 0.92  # within the threshold, though it does not fit
    play.step()
    assert play.triggers() == ["calibration"]
    play.budget = 650.0 * 0.7
    play.step()
    step, text, numbers = play.events[-1]
    assert (step, numbers["trigger"]) == (3, "budget")
    assert numbers["change"] == pytest.approx(-0.3)
    assert numbers["threshold"] == -0.1
    assert "30% less (threshold 10%)" in text
    assert PEAK(play.planner.predict(play.executor.memory_plan)) <= 455
    play.budget = 650.0
    play.step()
    assert play.executor.memory_plan == KEEP
    assert play.triggers() == ["calibration", "budget", "budget"]


def test_a_cut_that_changes_nothing_is_not_worth_a_word():
    play = Play(PlayedExecutor(), budget=10_000.0)
    play.step()
    play.budget = 700.0
    play.step()
    play.budget = 20_000.0
    play.step()
    assert play.triggers() == ["calibration"]


@pytest.mark.parametrize("error", [no_memory(), MemoryError()])
def test_the_same_step_again_under_a_tighter_plan(error):
    play = Play(PlayedExecutor())
    play.step()
    play.step()
    play.executor.trouble = [error, no_memory()]
    assert play.step().loss == 1.0
    assert play.executor.steps == 3
    assert play.triggers() == ["calibration", "out_of_memory", "out_of_memory"]
    (_, first, numbers), (_, _, again) = play.events[1:]
    assert "the step is computed again: from 4 keep to" in first
    assert numbers["limit_bytes"] == pytest.approx(600 * 0.9)
    assert numbers["threshold"] == -0.1
    assert again["limit_bytes"] < numbers["limit_bytes"]
    assert again["expected_bytes"] < numbers["expected_bytes"]
    play.step()
    assert play.triggers().count("out_of_memory") == 2  # what was learned stays learned


def test_no_tighter_plan():
    tight = MemoryPlan.uniform(LAYERS, activations="recompute")
    play = Play(PlayedExecutor(tight))
    play.executor.trouble = [no_memory()]
    play.step()  # once more, with what the failure has made free
    assert "there is no tighter memory plan" in play.events[0][1]
    play.executor.trouble = [no_memory(), no_memory()]
    with pytest.raises(torch.OutOfMemoryError):
        play.step()


def test_other_errors_go_through():
    play = Play(PlayedExecutor())
    for error in (RuntimeError("shapes do not match"), partial_update(no_memory(), "3 of 4 slices were updated")):
        play.executor.trouble = [error]
        with pytest.raises(type(error)):
            play.step()
    assert play.events == []
    assert "3 of 4 slices" in str(partial_update(no_memory(), "3 of 4 slices were updated"))
    assert PartialUpdateError.exit_code == 3


def test_a_placement_that_is_refused_leaves_the_old_one():
    play = Play(PlayedExecutor(), budget=650.0)
    play.step()
    play.step()
    play.executor.refuses = True
    play.budget = 400.0
    play.step()
    assert play.executor.memory_plan == KEEP
    assert "was refused: It does not go." in play.events[-1][1]


def test_a_step_that_went_on_makes_the_next_one_tighter():
    play = Play(PlayedExecutor())
    play.step()
    play.executor.trouble = [lambda: play.executor.transaction.oom_messages.extend(["CUDA out of memory."])]
    play.step()
    assert "found no memory 1 times in what cannot be taken back" in play.events[-1][1]
    assert play.executor.memory_plan != KEEP
    assert play.executor.transaction.oom_messages == []
    play.step()


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_the_second_step_settles_what_is_expected(factor):
    """Also by less than the threshold, up or down, and without a word: the first one compiles."""
    play = Play(PlayedExecutor())
    play.step()
    assert play.replanner.memory_factor == 1.0
    play.executor.factor = factor
    play.step()
    assert play.replanner.memory_factor == pytest.approx(factor, rel=0.01)
    play.executor.factor = factor * 1.03  # within what is expected now
    play.step()
    assert play.replanner.memory_factor == pytest.approx(factor, rel=0.01)
    assert play.triggers() == ["calibration"]


def test_a_second_step_that_makes_the_run_go_over_to_another_placement():
    # Two factors are settled by the step after which a new memory plan is taken, of which nothing is known yet.
    play = Play(PlayedExecutor(factor=1.0), budget=620)
    play.step()
    play.executor.factor = 1.1
    play.step()
    assert play.executor.memory_plan != KEEP
    assert play.replanner.time_factor == pytest.approx(2.0)
    assert play.replanner.memory_factor == pytest.approx(1.1)
    play.step()
    assert play.replanner.peak_bytes <= 620


def test_a_model_that_nobody_can_plan_keeps_less_and_less():
    play = Play(PlayedExecutor(), planner=None)
    play.step(2048)
    play.step(512)
    assert play.events == []
    play.executor.trouble = [no_memory(), no_memory(), no_memory()]
    play.step()
    assert [words(one) for one in tighter(KEEP)] == ["4 selective", "4 attention", "4 recompute"]
    assert [words(one) for one in tighter(KEEP, ["recompute"])] == ["4 recompute"]
    assert words(play.executor.memory_plan) == "4 recompute"
    play.executor.trouble = [no_memory(), no_memory()]
    with pytest.raises(torch.OutOfMemoryError):
        play.step()


def test_what_the_recipe_sets_stays():
    play = Play(PlayedExecutor(), planner=None, ladder=())
    play.executor.trouble = [no_memory()]
    play.step()
    assert play.executor.memory_plan == KEEP
    assert "there is no tighter memory plan" in play.events[-1][1]


def test_nothing_fits_into_a_smaller_budget():
    play = Play(PlayedExecutor(), budget=650.0)
    play.step()
    play.step()
    play.budget = 100.0
    play.step()
    assert words(play.executor.memory_plan) == "4 recompute"
    assert "nothing fits, so the smallest memory plan" in play.events[-1][1]
    count = len(play.events)
    play.step()
    assert len(play.events) == count


def test_words_of_a_mixed_placement():
    layers = list(KEEP.layers)
    layers[1] = replace(layers[1], activations="recompute", inputs="disk", parameters="host", states="disk")
    assert words(MemoryPlan(layers=tuple(layers))) == "3 keep, 1 recompute (inputs disk, parameters host, states disk)"
    less, least = tighter(MemoryPlan(layers=(LayerMemory(activations="selective"), layers[1])))
    assert words(less).startswith("1 attention, 1 recompute (")
    assert words(least) == "1 recompute, 1 recompute (inputs disk, parameters host, states disk)"
    assert row_length([{"pixels": torch.zeros(1)}]) is None
    assert math.isfinite(PEAK(PlayedPlanner().smallest()))


@given(factors=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4))
def test_steps_after_the_second_are_not_measured(factors):
    """Whatever they take: predicted is held beside measured once for a memory plan and a length of rows."""
    play = Play(PlayedExecutor(), budget=700.0)
    play.step()
    play.step()
    plan, told = play.executor.memory_plan, len(play.events)
    for factor in factors:
        play.executor.factor = factor
        play.step()
    assert (play.executor.memory_plan, len(play.events)) == (plan, told)
    assert play.replanner.memory_factor == 1.0
