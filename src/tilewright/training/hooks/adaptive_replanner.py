"""Moves a run between memory plans while it continues: measures, plans again, and makes room for a step that found no
memory.

    step = replanner.before_step(step)
    result = run_with_retries(compute, lambda said: replanner.reduce_memory(step.number, said))
    replanner.after_step(step, result)

The second step under a memory plan, the first that does not compile, says how far the plan is off: measured over
planned bytes, by which every later plan is multiplied. A new plan is made where one of four things happens, and is
taken where it must be (the old one does not fit) or where it is faster by enough to pay for the change:

    calibration     that step took more than 5 % above what was expected (1 % where it took more than the run may use),
                    or more than 5 % less
    shape           the rows of a batch have another length
    budget          free memory, or what the run may use, changed by more than 10 %
    out of memory   an allocator found none. The step has changed nothing (`transaction`), and is computed again under a
                    tighter plan: the same batch, the same random numbers, the same result

Plans differ in what layers keep and where bytes lie, which changes no bit of a result; so no trigger changes a loss.
Where a run takes under 80 % of what it may use, its free memory is looked at where a line is due (`next_step`), and
nothing is shown of it, unless its memory plan changes. Plans come from `planner.replan`.
"""

import math
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tilewright.core.errors import TilewrightError
from tilewright.core.memory_plan import STEP_PHASES, MemoryPlan
from tilewright.core.units import format_bytes, format_seconds
from tilewright.memory.tracking.byte_tables import is_out_of_memory
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.planner.plan import Plan
from tilewright.planner.replan import Replanner
from tilewright.training.executor.base import Executor, StepResult
from tilewright.training.hooks.rank_agreement import Agreement
from tilewright.training.hooks.step_hook import Step, StepHook
from tilewright.training.planning.describe_memory_plan import loosest, tighter, words

CUTS = 6
"""Budgets tried after an out-of-memory, each smaller, before the smallest memory plan is taken."""


NEAR = 0.80
"""Share of the bytes that the run may use from which on each step is watched."""
ERROR = 0.05
"""Measured over expected bytes, less one, from which on a new plan is made."""
OVER = 0.01
"""The same where a step takes more than the run may use."""
BUDGET = 0.10
"""The same of a change in the bytes that the run may use."""
CUT = 0.10
"""Less than what was expected of the memory plan that found no memory."""
GAIN = 0.02
"""Share of the step time that a change must save where it need not be made."""


class AdaptiveReplanner(StepHook):
    """Watches the steps of an executor, and moves it between memory plans.

    Args:
        executor: what runs.
        planner: gives the planner of this run, made when it is needed first; None where its model cannot be planned.
        memory_tracker: measures what steps take of the device.
        free: bytes of it that this rank may use now.
        record_event: records an event: step, text, shown (on the screen too), numbers.
        steps: of the run: what a change saves is weighed against the steps that are left.
        ladder: what layers may be treated as after an out-of-memory, where there is no planner.
        growth: of a step beyond the second, where the allocator keeps free blocks: a share of it.
        reserve: bytes of the device that this process holds outside of its allocator.
        agreement: of several ranks: what they measure is the worst of them, so that all decide the same.
        watch: plan again on all of the above; else only after an out-of-memory.
        known: what the memory plan that runs is expected to take with the first batch's rows, where that is known
            without a planner, which takes a second or more to be made.
    """

    def __init__(
        self,
        executor: Executor,
        planner: Callable[[], Replanner | None],
        memory_tracker: MemoryTracker,
        free: Callable[[], float],
        record_event: Callable[..., None],
        *,
        steps: int = 10**9,
        ladder: Collection[str] = ("selective", "attention", "recompute"),
        growth: float = 0.0,
        reserve: int = 0,
        agreement: Agreement | None = None,
        watch: bool = True,
        known: Plan | None = None,
    ) -> None:
        # What it acts on.
        self.executor = executor
        self.active = watch
        """True where anything but an out-of-memory matters."""
        self.next_step = 0 if watch else math.inf
        self._find_planner, self._known, self._looked = planner, known, False
        self._planner: Replanner | None = None
        self.row_length: int | None = None
        """Tokens of the longest row; None of images, and before the first step."""
        # What is expected, and how the last measurement differs from it.
        self.expected = known
        """Of the memory plan and row length that run now, before any correction; None while no planner was asked."""
        self.memory_factor = self.time_factor = 1.0
        """Measured over planned bytes and seconds. The latter is the same for all plans, so it orders none of them."""
        self.measured = 0.0
        """Highest peak in bytes of the step that was looked at last."""
        self.looks = 0
        """How often that was measured."""
        # What it asks and tells.
        self._memory_tracker, self._free, self._reserve = memory_tracker, free, reserve
        self._agreement = agreement or Agreement()
        self._record_event = record_event
        self._steps = steps
        self._ladder = ladder
        self._growth = growth
        # What it remembers between steps.
        self._number = 0
        self._planned_for: float | None = None
        self._limit = float("inf")
        """The device's limit as an out-of-memory has shown it."""
        self._first_s = 0.0
        """Seconds of the last first step under a memory plan: it compiles."""
        self._told = False

    # ---- around a step ----

    def before_step(self, step: Step) -> Step:
        """Re-plan before a step where the rows' length or the free memory has changed."""
        if not self.active:
            return step
        self._number, budget = step.number, self._allowed()
        if self._planned_for is None:
            self._planned_for, self.row_length = budget, step.row_length
        elif step.row_length != self.row_length:
            text = f"rows of {step.row_length} tokens, before {self.row_length}"
            self._restart(step.row_length)
            self._plan_again("shape", text, tokens=step.row_length)
        else:
            self._look_at_budget(budget, budget / self._planned_for - 1)
        return step

    def _look_at_budget(self, budget: float, change: float) -> None:
        less, most = change < 0, BUDGET
        if abs(change) <= most or (less and self._fits(budget)):
            return
        kind, threshold = ("less", -most) if less else ("more", most)
        text = f"the run may use {format_bytes(budget)}, {abs(change):.0%} {kind} (threshold {most:.0%})"
        self._plan_again("budget", text, quiet=not less, change=change, threshold=threshold)

    def after_step(self, step: Step, result: StepResult) -> None:
        """Compare the second step under a memory plan with its prediction, and re-plan if they differ."""
        self._number = step.number
        if self.executor.transaction.oom_messages:
            self._tighten_after_relief()
        if not self.active or self.looks >= 2:
            return
        if not self._is_known():
            self.next_step = math.inf  # there is no planner for this model
            return
        peaks = {name: float(size) for name, size in self._peaks().items() if name in STEP_PHASES}
        if not peaks:  # the memory plan has changed after the step, or there was nothing to compute
            return
        seconds = self._agreement.most(result.seconds)
        self.looks += 1
        self.measured = max(peaks.values())
        if self.looks == 1:
            self._first_s = seconds
            return
        self._calibrate(seconds)
        if self.looks:  # else a new plan begins
            self.next_step = 0 if self._near() else math.inf

    def _calibrate(self, seconds: float) -> None:
        """Calibrate the re-planner: set the factors by which every later plan is multiplied, and plan again if this
        plan is far off."""
        self.time_factor *= seconds / self.step_s
        error = self.measured / self.peak_bytes - 1
        words = f"{format_bytes(self.measured)} measured, {format_bytes(self.peak_bytes)} expected: {error:+.1%}"
        slightly = error <= ERROR and self.measured > self._allowed()
        threshold = OVER if slightly else ERROR
        numbers: dict[str, Any] = {"measured_bytes": self.measured, "expected_bytes": self.peak_bytes, "error": error}
        factor = (1 + error) * (1 + self._growth)  # what later steps will take
        self.memory_factor *= factor
        if factor - 1 >= -ERROR and error <= threshold:
            if not self._told:  # the user has seen that plans are right
                grown = "" if error >= -ERROR else f" with the {self._growth:.0%} more that later steps take"
                text = f"{words}, within {100 * ERROR:g}%{grown}"
                self._record("calibration", text, shown=self._near(), threshold=ERROR, **numbers)
            self._told = True
            return
        self._told = True
        text = f"{words} (threshold {100 * threshold:g}%), so plans are multiplied by {self.memory_factor:.3f}"
        self._plan_again("calibration", text, threshold=threshold, **numbers)

    def _near(self) -> bool:
        """True if the run takes so much of its memory that its user should hear of plans."""
        return max(self.measured, self.peak_bytes) >= NEAR * self._allowed()

    # ---- out of memory ----

    def reduce_memory(self, number: int, said: str) -> bool:
        """Take a tighter memory plan after a step that found no memory and changed nothing; False if there is none.

        Args:
            number: of the step, counted from 1.
            said: by the allocator.
        """
        self._number = number
        return self._tighten(f"an allocator found no memory ({said}); the step is computed again")

    def _tighten_after_relief(self) -> None:
        """Take a tighter memory plan after a step whose update ran out of memory, freed some, and ended well."""
        said = self.executor.transaction.oom_messages
        text = f"an allocator found no memory {len(said)} times in what cannot be taken back ({said[0]}); it continued"
        said.clear()
        self._tighten(text)

    def _tighten(self, text: str) -> bool:
        """Take a memory plan that needs less than the present one; False if there is none."""
        planner = self._planner_of_run()
        if planner is None:
            return self._tighten_unplanned(text)
        self._is_known()
        least = self.peak_bytes
        for found, limit in self._smaller(planner, least):
            if found.memory_plan != self.executor.memory_plan and found.step_bytes < least:
                self._limit = min(self._limit, limit)
                numbers = {"expected_bytes": least, "threshold": -CUT, "limit_bytes": limit}
                if self._switch("out_of_memory", text, found, **numbers):
                    self._planned_for = self._allowed()
                    return True
        self._record("out_of_memory", f"{text}; there is no tighter memory plan", expected_bytes=least)
        return False

    def _smaller(self, planner: Replanner, peak_bytes: float) -> Iterable[tuple[Plan, float]]:
        """Yield plans of the re-planner for smaller and smaller budgets, and last the smallest plan."""
        limit, factors = min(peak_bytes, self._allowed()), self._factors
        for _ in range(CUTS):
            limit *= 1 - CUT
            found = planner.plan(limit, self.row_length, **factors)
            if found is None:
                break
            yield found, limit
        found = planner.smallest(self.row_length, memory_factor=self.memory_factor)
        if found is not None:
            yield found, found.step_bytes

    def _tighten_unplanned(self, text: str) -> bool:
        for memory_plan in tighter(self.executor.memory_plan, self._ladder):
            if self._place("out_of_memory", text, memory_plan):
                return True
        self._record("out_of_memory", f"{text}; there is no tighter memory plan")
        return False

    # ---- decisions ----

    def _plan_again(self, trigger: str, text: str, *, quiet: bool = False, **numbers: Any) -> None:
        """Find the fastest memory plan for what is known now, and take it if the run must, or if it pays.

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

        if self._fits(budget) and self._is_known() and loosest(self.executor.memory_plan):
            return stays("it fits, and nothing is faster than to keep everything")
        planner = self._planner_of_run()
        if planner is None or not self._is_known():  # the run has said so when it began
            return None
        started = time.perf_counter()
        found = planner.plan(budget, self.row_length, **self._factors)
        none_fits = found is None
        found = found or planner.smallest(self.row_length, memory_factor=self.memory_factor)
        numbers |= {"plan_s": time.perf_counter() - started}
        if found is None or found.memory_plan == self.executor.memory_plan:
            return stays("nothing fits better" if none_fits else "it is the best for this")
        saved_s = self.step_s - found.step_s
        if self.peak_bytes <= budget and not self._pays(saved_s):
            would = f"{format_seconds(saved_s)} a step would be saved, which does not pay for a change"
            return stays(would if saved_s > 0 else "it still fits")
        if self.peak_bytes > budget and found.step_bytes >= self.peak_bytes:
            return stays("it is the smallest there is")
        self._switch(
            trigger, f"{text}; nothing fits, so the smallest memory plan" if none_fits else text, found, **numbers
        )
        return None

    def _pays(self, saved_s: float) -> bool:
        """True where a re-plan that is not needed is worth it: a first step under a new memory plan compiles again."""
        steps_left = self._steps - self._number
        return saved_s > GAIN * self.step_s and saved_s * steps_left > self._first_s

    def _switch(self, trigger: str, text: str, found: Plan, **numbers: Any) -> bool:
        numbers |= {"peak_bytes": found.step_bytes, "step_s": found.step_s}
        told = f"; {format_bytes(found.step_bytes)} and {format_seconds(found.step_s)} a step expected"
        return self._place(trigger, text, found.memory_plan, told, **numbers)

    def _place(self, trigger: str, text: str, memory_plan: MemoryPlan, told: str = "", **numbers: Any) -> bool:
        """Place a re-planned memory plan; False where the executor cannot, and the old one runs on."""
        before, after = words(self.executor.memory_plan), words(memory_plan)
        try:
            self._agreement.apply(self.executor, memory_plan)
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
        self._restart(self.row_length)
        self.next_step = 0 if self.active else math.inf
        self.executor.transaction.free_memory()  # what the old one took is measured no more
        self._peaks()  # those up to now are of the old one
        return True

    # ---- what is expected ----

    @property
    def peak_bytes(self) -> float:
        """The re-planner's expected peak of a step in bytes, corrected."""
        assert self.expected is not None, "nothing is expected yet"
        return self.memory_factor * self.expected.step_bytes

    @property
    def step_s(self) -> float:
        """The re-planner's expected seconds of a step, corrected."""
        assert self.expected is not None, "nothing is expected yet"
        return self.time_factor * self.expected.step_s

    @property
    def _factors(self) -> dict[str, float]:
        return {"memory_factor": self.memory_factor, "time_factor": self.time_factor}

    def _restart(self, row_length: int | None) -> None:
        """Restart the re-planner's measurements: none of them belongs to the new memory plan or row length."""
        self.row_length, self.expected, self.measured, self.looks = row_length, None, 0.0, 0

    def _planner_of_run(self) -> Replanner | None:
        """The re-planner's planner of this run, made now if it is not there; None where the model cannot be planned."""
        if not self._looked:
            self._planner, self._looked = self._find_planner(), True
            known, self._known = self._known, None
            if self._planner is not None and known is not None and self.expected is known:
                self.expected = self._planner.predict(self.executor.memory_plan, self.row_length)
                # What was measured stays; the planner may say otherwise than who spoke before.
                self.memory_factor *= known.step_bytes / self.expected.step_bytes
                self.time_factor *= known.step_s / self.expected.step_s
        return self._planner

    def _is_known(self) -> bool:
        """True where the re-planner expects anything of the present plan; a planner is asked where nothing is."""
        if self.expected is None and (planner := self._planner_of_run()) is not None:
            self.expected = planner.predict(self.executor.memory_plan, self.row_length)
        return self.expected is not None

    def _fits(self, budget: float) -> bool:
        return not self._is_known() or self.peak_bytes <= budget

    def _allowed(self) -> float:
        """Bytes that the re-planner may use on the device now."""
        return min(self._agreement.least(self._free()), self._limit)

    def _peaks(self) -> Mapping[str, int]:
        """Peak bytes by phase since the re-planner asked last, on the rank that took most."""
        own = self._memory_tracker.take_peaks()
        return self._agreement.worst({name: size + self._reserve for name, size in own.items()})

    def _record(self, trigger: str, text: str, *, shown: bool = True, **numbers: Any) -> None:
        text = f"{trigger.replace('_', ' ')}: {text}"
        self._record_event(self._number, text, shown=shown, trigger=trigger, **numbers)
