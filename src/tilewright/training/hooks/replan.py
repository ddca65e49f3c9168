"""Regroups the slices of a run while it continues: measures, plans again, and makes room for a step that found no
memory.

    replanner = AdaptiveReplanner(executor, planner, budget=..., peaks=memory_tracker.take_peaks, record_event=...)
    step = replanner.before_step(step)
    result = run_with_retries(compute, lambda said: replanner.reduce_memory(step.number, said))
    replanner.after_step(step, result)

The first two steps say how far the plan is off (`forecast`): measured over planned bytes, by which every later plan is
multiplied (upwards by the first, downwards by the second: the first step's allocator has free blocks that no later one
finds). A new plan is made where one of four things happens, and is taken where it must be (the old one does not fit) or
where it is faster by enough to pay for the change:

    shape           the rows of a batch have another length
    budget          free memory, or what the run may use, changed by more than 10 %
    prediction      a step took more than 5 % above what was expected (1 % where it took more than the run may use),
                    also after the allocator's free blocks were returned
    out of memory   an allocator found none. The step has changed nothing (`transaction`), and is computed again under a
                    tighter plan: the same batch, the same random numbers, the same result

Plans differ in what layers keep and where bytes lie, which changes no bit of a result; so no trigger changes a loss.
A run that takes under 80 % of what it may use need not be watched at each step: `next_step` says so, and the loop then
calls it where a line is due. Nothing is shown of it either, unless its memory plan changes. Plans come from
`planner.replan`.
"""

import math
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.core.errors import TilewrightError
from tilewright.core.memory_plan import MemoryPlan
from tilewright.core.units import format_bytes, format_seconds
from tilewright.memory.tracking.format import is_out_of_memory
from tilewright.training.executor.base import Executor, StepResult
from tilewright.training.hooks.base import Step, StepHook
from tilewright.training.hooks.forecast import STEP_PHASES, Expected, Forecast, peak_of
from tilewright.training.planning.describe import loosest, tighter, words

if TYPE_CHECKING:  # the solver is loaded by who plans
    from tilewright.planner.replan import Replanner

CUTS = 6
"""Budgets tried after an out-of-memory, each smaller, before the smallest memory plan is taken."""


@dataclass(frozen=True)
class ReplanThresholds:
    """When to plan again."""

    near: float = 0.80
    """Share of the bytes that the run may use from which on each step is watched."""
    error: float = 0.05
    """Measured over expected bytes, less one."""
    over: float = 0.01
    """The same where a step takes more than the run may use."""
    budget: float = 0.10
    """Change in the bytes that the run may use."""
    cut: float = 0.10
    """Less than what was expected of the memory plan that found no memory."""
    growth: float = 0.03
    """Of a step beyond the second, where the allocator keeps free blocks (measured in eight runs: 3 to 7 %)."""
    gain: float = 0.02
    """Share of the step time that a change must save where it need not be made."""


class AdaptiveReplanner(StepHook):
    """Watches the steps of an executor, and moves it between memory plans.

    Args:
        executor: what runs.
        planner: gives the planner of this run, made when it is needed first; None where its model cannot be planned.
        budget: bytes that the run may use on the device now.
        peaks: peak bytes by phase since it was asked last.
        state_bytes: bytes of the optimizer's states on the device now: they are made by the first update, and the
            first step's peaks lack them.
        record_event: records an event: step, text, shown (on the screen too), numbers.
        steps: of the run: what a change saves is weighed against the steps that are left.
        ladder: what layers may be treated as after an out-of-memory, where there is no planner.
        give_back: makes the allocator return its free blocks, where they are in `peaks`.
        watch: plan again on shape, budget and prediction; else only after an out-of-memory.
        known: what the memory plan that runs is expected to take with the first batch's rows, where that is known
            without a planner, which takes a second or more to be made.
        seconds: of a step as this process measured it, to what is reckoned with: of several ranks the slowest's.
        apply: takes the executor over to a memory plan; by default its own method.
        rules: when.
    """

    def __init__(
        self,
        executor: Executor,
        planner: "Callable[[], Replanner | None]",
        *,
        budget: Callable[[], float],
        peaks: Callable[[], Mapping[str, int]],
        record_event: Callable[..., None],
        state_bytes: Callable[[], int] = lambda: 0,
        steps: int = 10**9,
        ladder: Collection[str] = ("selective", "attention", "recompute"),
        give_back: Callable[[], None] | None = None,
        watch: bool = True,
        known: Expected | None = None,
        seconds: Callable[[float], float] = float,
        apply: Callable[[MemoryPlan], None] | None = None,
        rules: ReplanThresholds = ReplanThresholds(),
    ) -> None:
        self.executor = executor
        self.rules = rules
        self.active = watch
        """Whether anything but an out-of-memory matters."""
        self.next_step = 0 if watch else math.inf
        """The next one, or a look now and then is enough."""
        self.forecast = Forecast(executor, planner, known)
        self._budget = budget
        self._peaks = peaks
        self._state_bytes = state_bytes
        self._record_event = record_event
        self._steps = steps
        self._ladder = ladder
        self._give_back = give_back
        self._seconds = seconds
        self._apply = apply or executor.apply_memory_plan
        self._number = 0
        self._planned_for: float | None = None
        self._limit = float("inf")
        """What an out-of-memory has taught of the device."""
        self._states_before = 0
        self._first_s: float | None = None
        """Seconds of the first step that was looked at: it compiles."""
        self._calibrated = False
        """A step was compared with the plan, so the optimizer's states are there."""
        self._gave_back = False
        """After the look before this one: free blocks do not explain a peak now."""

    # ---- before a step ----

    def before_step(self, step: Step) -> Step:
        """Plan again where the rows' length or the free memory has changed."""
        if self.active:
            self._number = step.number
            self._look_before(step.row_length)
        return step

    def _look_before(self, row_length: int | None) -> None:
        if not self._calibrated:
            self._states_before = self._state_bytes()
        budget = self._allowed()
        if self._planned_for is None:
            self._planned_for, self.forecast.row_length = budget, row_length
            return
        if row_length != self.forecast.row_length:
            text = f"rows of {row_length} tokens, before {self.forecast.row_length}"
            self.forecast.restart(row_length)
            self._plan_again("shape", text, tokens=row_length)
            return
        change = budget / self._planned_for - 1
        if change < -self.rules.budget and not self._fits(budget):
            text = f"the run may use {format_bytes(budget)}, {-change:.0%} less (threshold {self.rules.budget:.0%})"
            self._plan_again("budget", text, change=change, threshold=-self.rules.budget)
        elif change > self.rules.budget:
            text = f"the run may use {format_bytes(budget)}, {change:.0%} more (threshold {self.rules.budget:.0%})"
            self._plan_again("budget", text, quiet=True, change=change, threshold=self.rules.budget)

    # ---- after a step ----

    def after_step(self, step: Step, result: StepResult) -> None:
        """Compare the steps since the last look with what was expected of them."""
        self._number, seconds = step.number, self._seconds(result.seconds)
        if self.executor.transaction.oom_messages:
            self._tighten_after_relief()
        if not self.active:
            return
        peaks = {name: float(size) for name, size in self._peaks().items() if name in STEP_PHASES}
        if not self.forecast.is_known():
            self.next_step = math.inf  # nobody can plan this model
            return
        if not peaks:  # the memory plan has changed after the step, or there was nothing to compute
            return
        if self._first_s is None:
            self._first_s = seconds
        if not self._calibrated:  # the first update makes the states, so what came before it lacks them
            made = self._state_bytes() - self._states_before
            peaks = {name: size + (made if name != "update" else 0.0) for name, size in peaks.items()}
        self.forecast.measure(peaks.values())
        if self.forecast.looks == 1:
            self._first_look()
        elif self.forecast.looks == 2:
            self._second_look(seconds)
        else:
            self._later_look()
        self._calibrated = True
        self.next_step = 0 if self.forecast.looks < 2 or self._near() else math.inf

    def _first_look(self) -> None:
        """The first step of a memory plan compiles: one that took too much is believed, one that took less not yet."""
        error, threshold = self.forecast.error, self._threshold()
        if error > threshold:
            self._correct(1 + error, threshold)
        elif not self._calibrated:
            within = error >= -self.rules.error
            then = f"within {self.rules.error:.0%}" if within else "and the second step says whether it stays"
            text = f"{self.forecast.words()}, {then}"
            self._record("calibration", text, shown=self._near(), error=error, threshold=self.rules.error)

    def _second_look(self, seconds: float) -> None:
        """The second step settles both factors, up or down; a new plan is made where it is far off."""
        self.forecast.time_factor *= seconds / self.forecast.step_s
        threshold, error = self._threshold(), self.forecast.error
        grown = 1.0 if self._give_back is None else 1 + self.rules.growth  # what later steps will take
        factor = (1 + error) * grown
        if error > threshold or factor < 1 - self.rules.error:
            self._correct(factor, threshold)
        else:
            self.forecast.memory_factor *= factor

    def _later_look(self) -> None:
        """A step that took too much: free blocks are returned once, and what is still too much corrects the plan."""
        error, threshold = self.forecast.error, self._threshold()
        if error <= threshold:
            self._gave_back = False
        elif self._give_back is not None and not self._gave_back:
            self._give_back()
            self.forecast.measured, self._gave_back = 0.0, True
        else:
            self._correct(1 + error, threshold)

    def _correct(self, factor: float, threshold: float) -> None:
        """Multiply every later plan, and plan again."""
        measured, error = self.forecast.words(), self.forecast.error
        numbers = {"measured_bytes": self.forecast.measured, "expected_bytes": self.forecast.peak_bytes, "error": error}
        self.forecast.memory_factor *= factor
        text = (
            f"{measured} (threshold {100 * threshold:g}%), so plans are multiplied by {self.forecast.memory_factor:.3f}"
        )
        kind = "prediction" if self._calibrated else "calibration"
        self._plan_again(kind, text, threshold=threshold, **numbers)

    def _threshold(self) -> float:
        """How much more than expected is too much: less, where it is more than the run may use."""
        slightly = self.forecast.error <= self.rules.error and self.forecast.measured > self._allowed()
        return self.rules.over if slightly else self.rules.error

    def _near(self) -> bool:
        """Whether the run takes so much of what it may use that its user should hear of plans."""
        return max(self.forecast.measured, self.forecast.peak_bytes) >= self.rules.near * self._allowed()

    # ---- out of memory ----

    def reduce_memory(self, number: int, said: str) -> bool:
        """Make room for a step that found no memory and has changed nothing; False where there is no tighter memory
        plan.

        Args:
            number: of the step, counted from 1.
            said: by the allocator.
        """
        self._number = number
        return self._tighten(f"an allocator found no memory ({said}); the step is computed again")

    def _tighten_after_relief(self) -> None:
        """A step met an out-of-memory in its update, made memory free, and came to its end."""
        said = self.executor.transaction.oom_messages
        text = f"an allocator found no memory {len(said)} times in what cannot be taken back ({said[0]}); it continued"
        said.clear()
        self._tighten(text)

    def _tighten(self, text: str) -> bool:
        """Go over to a memory plan that takes less than the present one; False where there is none."""
        planner = self.forecast.planner()
        if planner is None:
            return self._tighten_unplanned(text)
        self.forecast.is_known()
        least = self.forecast.peak_bytes
        for found, limit in self._smaller(planner, least):
            if found.memory_plan != self.executor.memory_plan and peak_of(found) < least:
                self._limit = min(self._limit, limit)
                numbers = {"expected_bytes": least, "threshold": -self.rules.cut, "limit_bytes": limit}
                if self._switch("out_of_memory", text, found, **numbers):
                    self._planned_for = self._allowed()
                    return True
        self._record("out_of_memory", f"{text}; there is no tighter memory plan", expected_bytes=least)
        return False

    def _smaller(self, planner: "Replanner", peak_bytes: float) -> Iterable[tuple[Expected, float]]:
        """Plans for less and less, and the smallest."""
        limit = min(peak_bytes, self._allowed())
        for _ in range(CUTS):
            limit *= 1 - self.rules.cut
            found = planner.plan(limit, self.forecast.row_length, **self.forecast.factors)
            if found is None:
                break
            yield found, limit
        found = planner.smallest(self.forecast.row_length, memory_factor=self.forecast.memory_factor)
        if found is not None:
            yield found, peak_of(found)

    def _tighten_unplanned(self, text: str) -> bool:
        for memory_plan in tighter(self.executor.memory_plan, self._ladder):
            if self._place("out_of_memory", text, memory_plan):
                return True
        self._record("out_of_memory", f"{text}; there is no tighter memory plan")
        return False

    # ---- decisions ----

    def _plan_again(self, trigger: str, text: str, *, quiet: bool = False, **numbers: Any) -> None:
        """Find the fastest memory plan for what is known now; take it where that must be, or pays.

        Args:
            trigger: what happened.
            text: the same with its number and threshold.
            quiet: record nothing where all stays as it is.
            numbers: for the record.
        """
        budget = self._planned_for = self._allowed()
        numbers |= {"budget_bytes": budget}

        def stays(why: str) -> None:
            if not quiet:
                self._record(trigger, f"{text}; the memory plan stays: {why}", shown=self._near(), **numbers)

        if self._fits(budget) and self.forecast.is_known() and loosest(self.executor.memory_plan):
            return stays("it fits, and nothing is faster than to keep everything")
        planner = self.forecast.planner()
        if planner is None or not self.forecast.is_known():  # the run has said so when it began
            return None
        started = time.perf_counter()
        found = planner.plan(budget, self.forecast.row_length, **self.forecast.factors)
        none_fits = found is None
        found = found or planner.smallest(self.forecast.row_length, memory_factor=self.forecast.memory_factor)
        numbers |= {"plan_s": time.perf_counter() - started}
        if found is None or found.memory_plan == self.executor.memory_plan:
            return stays("nothing fits better" if none_fits else "it is the best for this")
        saved_s = self.forecast.step_s - found.step_s
        if self.forecast.peak_bytes <= budget and not self._pays(saved_s):
            would = f"{format_seconds(saved_s)} a step would be saved, which does not pay for a change"
            return stays(would if saved_s > 0 else "it still fits")
        if self.forecast.peak_bytes > budget and peak_of(found) >= self.forecast.peak_bytes:
            return stays("it is the smallest there is")
        self._switch(
            trigger, f"{text}; nothing fits, so the smallest memory plan" if none_fits else text, found, **numbers
        )
        return None

    def _pays(self, saved_s: float) -> bool:
        """Whether a change that need not be made is worth it: a first step under a new memory plan compiles again."""
        steps_left = self._steps - self._number
        return saved_s > self.rules.gain * self.forecast.step_s and saved_s * steps_left > (self._first_s or 0.0)

    def _switch(self, trigger: str, text: str, found: Expected, **numbers: Any) -> bool:
        numbers |= {"peak_bytes": peak_of(found), "step_s": found.step_s}
        told = f"; {format_bytes(peak_of(found))} and {format_seconds(found.step_s)} a step expected"
        return self._place(trigger, text, found.memory_plan, told, **numbers)

    def _place(self, trigger: str, text: str, memory_plan: MemoryPlan, told: str = "", **numbers: Any) -> bool:
        """Go over to a memory plan; False where the executor cannot, and the old one runs on."""
        before, after = words(self.executor.memory_plan), words(memory_plan)
        try:
            self._apply(memory_plan)
        except TilewrightError as error:
            self._record(trigger, f"{text}; {after} was refused: {error.problems[0].what}", **numbers)
            return False
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            self._record(trigger, f"{text}; no memory to go over to {after}", **numbers)
            return False
        self._record(trigger, f"{text}: from {before} to {after}{told}", before=before, after=after, **numbers)
        self.forecast.restart(self.forecast.row_length)
        self.next_step, self._gave_back = 0 if self.active else math.inf, False
        self.executor.transaction.free_memory()  # what the old one took is measured no more
        self._peaks()  # those up to now are of the old one
        return True

    # ---- what is known ----

    def _fits(self, budget: float) -> bool:
        return not self.forecast.is_known() or self.forecast.peak_bytes <= budget

    def _allowed(self) -> float:
        return min(self._budget(), self._limit)

    def _record(self, trigger: str, text: str, *, shown: bool = True, **numbers: Any) -> None:
        text = f"{trigger.replace('_', ' ')}: {text}"
        self._record_event(self._number, text, shown=shown, trigger=trigger, **numbers)
