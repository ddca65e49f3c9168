"""Regroups the slices of a run while it goes on: measures, plans again, and computes a step again that found no memory.

    regroup = Regroup(executor, replanner=..., budget=..., peaks=ledger.take_peaks, tell=...)
    result = regroup.step(number, microbatches, lr)          # instead of executor.step

The first two steps say how far the plan is off: measured over planned bytes, which every later plan is corrected by
(upwards by the first, downwards by the second: the first step's allocator has free blocks that no later one finds). A
new plan is made where one of four things happens, and is taken where it must be (the old one does not fit) or where it
is faster by enough to pay for the change:

    shape           the rows of a batch have another length
    budget          free memory, or what the run may use, changed by more than 10 %
    prediction      a step took more than 5 % above what was expected (1 % where it took more than the run may use),
                    and not because of the allocator's free blocks: a C library's grow for hundreds of steps, where
                    none of them needs more than the first, and are given back at 2.5 %
    out of memory   an allocator found none. The step has changed nothing (`whole`), and is computed again under a
                    tighter plan: the same batch, the same random numbers, the same result

Plans differ in what layers keep and where bytes lie, which changes no bit of a result; so no trigger changes a loss.
Every decision is told with its number and its threshold. Called by `run`; plans come from `plan.replan`.
"""

import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tilewright.core.errors import TilewrightError
from tilewright.core.placement import Placement
from tilewright.core.units import format_bytes, format_seconds
from tilewright.memory.table import is_out_of_memory
from tilewright.training.placement_words import loosest, tighter, words
from tilewright.training.step import Batch, StepResult
from tilewright.training.whole import WholeStep, first_line

Result = TypeVar("Result")
STEP_PHASES = ("forward", "loss", "backward", "update")
CUTS = 6
"""Budgets tried after an out-of-memory, each smaller, before the smallest placement is taken."""


@dataclass(frozen=True)
class Rules:
    """When to plan again."""

    error: float = 0.05
    """Measured over expected bytes, less one."""
    over: float = 0.01
    """The same where a step takes more than the run may use."""
    budget: float = 0.10
    """Change in the bytes that the run may use."""
    cut: float = 0.10
    """Less than what was expected of the placement that found no memory."""
    growth: float = 0.03
    """Of a step beyond the second, where the allocator keeps free blocks (measured in eight runs: 3 to 7 %)."""
    drift: float = 0.025
    """Measured over expected bytes, less one, at which free blocks are given back."""
    relief: int = 5
    """Steps between two times that they are: it takes 20 to 60 ms, and the next step fetches its pages anew."""
    gain: float = 0.02
    """Share of the step time that a change must save where it need not be made."""


class Expected(Protocol):
    """A placement and what it takes; `plan.replan.Replan`."""

    @property
    def placement(self) -> Placement: ...

    @property
    def phases(self) -> Mapping[str, Mapping[str, float]]: ...

    @property
    def step_s(self) -> float: ...


class Planner(Protocol):
    """`plan.replan.Replanner`."""

    def plan(
        self, device_bytes: float, seq_len: int | None = None, *, memory_factor: float = 1.0, time_factor: float = 1.0
    ) -> Expected | None: ...

    def predict(
        self, placement: Placement, seq_len: int | None = None, *, memory_factor: float = 1.0, time_factor: float = 1.0
    ) -> Expected: ...

    def smallest(self, seq_len: int | None = None, *, memory_factor: float = 1.0) -> Expected | None: ...


class Movable(Protocol):
    """An executor whose placement can change between steps."""

    whole: WholeStep

    @property
    def placement(self) -> Placement: ...

    def step(self, microbatches: Sequence[Batch], lr: float) -> StepResult: ...

    def place(self, placement: Placement) -> None:
        """Go over to another placement. On an error the old one is what runs."""
        ...


class Regroup:
    """Runs the steps of an executor, and moves it between placements.

    Args:
        executor: what runs.
        planner: gives the planner of this run, made when it is needed first; None where its model cannot be planned.
        budget: bytes that the run may use on the device now. Asked before each step.
        peaks: peak bytes by phase since it was asked last.
        state_bytes: bytes of the optimizer's states on the device now: they are made by the first update, and the
            first step's peaks lack them.
        tell: records an event: step, text, numbers.
        steps: of the run: what a change saves is weighed against the steps that are left.
        ladder: what layers may be treated as after an out-of-memory, where there is no planner.
        give_back: makes the allocator return its free blocks, where they are in `peaks`.
        watch: plan again on shape, budget and prediction; else only after an out-of-memory.
        known: what the placement that runs is expected to take with the first batch's rows, where that is known
            without a planner, which takes a second or more to be made.
        rules: when.
    """

    def __init__(
        self,
        executor: Movable,
        planner: Callable[[], Planner | None],
        *,
        budget: Callable[[], float],
        peaks: Callable[[], Mapping[str, int]],
        tell: Callable[..., None],
        state_bytes: Callable[[], int] = lambda: 0,
        steps: int = 10**9,
        ladder: Collection[str] = ("selective", "attention", "recompute"),
        give_back: Callable[[], None] | None = None,
        watch: bool = True,
        known: Expected | None = None,
        rules: Rules = Rules(),
    ) -> None:
        self.executor = executor
        self.rules = rules
        self.memory_factor = 1.0
        """Measured over planned bytes."""
        self.time_factor = 1.0
        """Measured over planned seconds. The same for all plans, so it orders none of them."""
        self._find_planner = planner
        self._planner: Planner | None = None
        self._looked = False
        self._budget = budget
        self._peaks = peaks
        self._state_bytes = state_bytes
        self._tell_event = tell
        self._steps = steps
        self._ladder = ladder
        self._give_back = give_back
        self._watch = watch
        self._number = 0
        self._length: int | None = None
        self._planned_for: float | None = None
        self._limit = float("inf")
        """What an out-of-memory has taught of the device."""
        self._known = known
        self._expected = known
        """What the present placement is expected to take, before any correction."""
        self._measured = 0.0
        """Highest peak under this placement and length."""
        self._under = 0
        """Steps under this placement and length."""
        self._relieved_at = 0
        """The last of them after which free blocks were given back; 0: none."""
        self._first_s = 0.0
        self._calibrated = False

    # ---- steps ----

    def step(self, number: int, microbatches: Sequence[Batch], lr: float) -> StepResult:
        """One step, whole, whatever memory does.

        Args:
            number: of the step, counted from 1.
            microbatches: see `Executor.step`.
            lr: see there.

        Raises:
            torch.OutOfMemoryError, RuntimeError, MemoryError: no memory, no tighter placement, and no memory the second
                time either. Nothing has changed.
            HalfUpdated: no memory in the middle of an update.
        """
        self._number = number
        if self._watch:
            self._look_ahead(microbatches)
        states = self._state_bytes() if not self._calibrated else 0
        result = self.retried(lambda: self.executor.step(microbatches, lr))
        if self.executor.whole.relieved:
            self._went_on()
        if self._watch:
            made = self._state_bytes() - states if not self._calibrated else 0
            self._look_back(result.seconds, made)
        return result

    def retried(self, work: Callable[[], Result]) -> Result:
        """work(), again under a tighter placement where an allocator finds no memory.

        Args:
            work: changes nothing where it does not come to its end.
        """
        last = False
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
                failed = error
            if last:
                raise failed
            said = f"an allocator found no memory ({first_line(failed)}); the step is computed again"
            last = not self._tighten(said)  # then once more: what the failure has made free may do

    # ---- triggers ----

    def _look_ahead(self, microbatches: Sequence[Batch]) -> None:
        budget = self._allowed()
        length = length_of(microbatches)
        if self._planned_for is None:
            self._planned_for, self._length = budget, length
            return
        change = budget / self._planned_for - 1
        if length != self._length:
            text, self._length = f"rows of {length} tokens, before {self._length}", length
            self._begin_anew()
            self._plan_again("shape", text, tokens=length)
        elif change < -self.rules.budget and not self._fits(budget):
            text = f"the run may use {format_bytes(budget)}, {-change:.0%} less (threshold {self.rules.budget:.0%})"
            self._plan_again("budget", text, change=change, threshold=-self.rules.budget)
        elif change > self.rules.budget:
            text = f"the run may use {format_bytes(budget)}, {change:.0%} more (threshold {self.rules.budget:.0%})"
            self._plan_again("budget", text, quiet=True, change=change, threshold=self.rules.budget)

    def _look_back(self, seconds: float, states_made: int) -> None:
        """Compare the step with what was expected of it."""
        peaks = {name: size for name, size in self._peaks().items() if name in STEP_PHASES}
        self._under += 1
        if self._number == 1 or not self._first_s:
            self._first_s = seconds
        if not peaks or not self._is_expected():
            return
        before = {name: size + (states_made if name != "update" else 0) for name, size in peaks.items()}
        # The first step of a placement compiles, and what the optimizer then makes is added to it by guess.
        settled = self._under == 2
        self._measured = max(0.0 if settled else self._measured, *before.values())
        if settled:  # before anything below goes over to a placement of which nothing is known yet
            self.time_factor *= seconds / self._step_s
        expected = self._peak_bytes
        error = self._measured / expected - 1
        later = (1 + error) * (1 + self.rules.growth * (self._give_back is not None))  # what the second step foretells
        slightly = error <= self.rules.error and self._measured > self._allowed()
        threshold = self.rules.over if slightly else self.rules.error
        drift = min(threshold, self.rules.drift)
        if error > drift and self._relievable():
            self._relieve(expected, error, drift)
        elif error > threshold and self._piles_up():
            pass
        elif error > threshold or (settled and later < 1 - self.rules.error):
            self.memory_factor *= later if settled else 1 + error
            kind = "prediction" if self._calibrated else "calibration"
            text = (
                f"{format_bytes(self._measured)} measured, {format_bytes(expected)} expected: {error:+.1%} "
                f"(threshold {100 * threshold:g}%), so plans are multiplied by {self.memory_factor:.3f}"
            )
            numbers = {"measured_bytes": self._measured, "expected_bytes": expected, "error": error}
            self._plan_again(kind, text, threshold=threshold, **numbers)
        elif not self._calibrated:
            text = f"{format_bytes(self._measured)} measured, {format_bytes(expected)} expected: {error:+.1%}"
            # Less than expected may be more in the next step: an allocator's blocks are not where they will be.
            within = error >= -self.rules.error
            then = f"within {self.rules.error:.0%}" if within else "and the second step says whether it stays"
            self._tell("calibration", f"{text}, {then}", error=error, threshold=self.rules.error)
        elif settled:
            self.memory_factor *= later
        elif error > drift and self._under == self._relieved_at + 1:  # what was given back was not too much
            self.memory_factor *= 1 + error
        self._calibrated = True

    def _relievable(self) -> bool:
        """Whether free blocks may be what is too much, and were not given back just now: every so many steps, or every
        other step where the run may not use what they take."""
        pause = 1 if self._measured > self._allowed() else self.rules.relief
        rested = not self._relieved_at or self._under > self._relieved_at + pause
        return self._give_back is not None and self._under > 2 and rested

    def _piles_up(self) -> bool:
        """Whether what is too much is not what the plan must learn: only the first step after free blocks were given
        back shows what is needed."""
        return self._relieved_at > 0 and self._under > self._relieved_at + 1

    def _relieve(self, expected: float, error: float, threshold: float) -> None:
        """Give free blocks back; only what is measured from now on counts."""
        assert self._give_back is not None
        self._give_back()
        if not self._relieved_at:
            text = (
                f"{format_bytes(self._measured)} measured, {format_bytes(expected)} expected: {error:+.1%} (threshold "
                f"{100 * threshold:g}%), so the allocator's free blocks are given back; from now on without a word, "
                f"every {self.rules.relief} steps at most"
            )
            numbers = {"measured_bytes": self._measured, "expected_bytes": expected, "error": error}
            self._tell("prediction", text, threshold=threshold, **numbers)
        self._measured, self._relieved_at = 0.0, self._under

    def _went_on(self) -> None:
        """A step met an out-of-memory in its update, made memory free, and came to its end."""
        said = self.executor.whole.relieved
        text = f"an allocator found no memory {len(said)} times in what cannot be taken back ({said[0]}); it went on"
        said.clear()
        self._tighten(text)

    # ---- decisions ----

    def _plan_again(self, trigger: str, text: str, *, quiet: bool = False, **numbers: Any) -> None:
        """Find the fastest placement for what is known now; take it where that must be, or pays.

        Args:
            trigger: what happened.
            text: the same with its number and threshold.
            quiet: say nothing where all stays as it is.
            numbers: for the record.
        """
        budget = self._allowed()
        self._planned_for = budget
        if self._is_expected() and self._peak_bytes <= budget and loosest(self.executor.placement):
            if not quiet:
                told = f"{text}; the placement stays: it fits, and nothing is faster than to keep everything"
                self._tell(trigger, told, budget_bytes=budget, **numbers)
            return
        planner = self._the_planner()
        if planner is None:  # the run has said so when it began
            return
        started = time.perf_counter()
        found = planner.plan(budget, self._length, **self._factors)
        none = found is None
        if found is None:
            found = planner.smallest(self._length, memory_factor=self.memory_factor)
        numbers |= {"budget_bytes": budget, "plan_s": time.perf_counter() - started}
        peak, step_s = self._peak_bytes, self._step_s
        if found is None or found.placement == self.executor.placement:
            if not quiet:
                why = "nothing fits better" if none else "it is the best for this"
                self._tell(trigger, f"{text}; the placement stays, {why}", **numbers)
            return
        must, saved_s = peak > budget, step_s - found.step_s
        if must and peak_of(found) >= peak:
            self._tell(trigger, f"{text}; the placement stays, it is the smallest there is", **numbers)
        elif must or self._pays(saved_s, step_s):
            reason = f"{text}; nothing fits, so the smallest placement" if none else text
            self._switch(trigger, reason, found, **numbers)
        elif not quiet:
            why = f"{format_seconds(saved_s)} a step would be saved, which does not pay for a change"
            self._tell(trigger, f"{text}; the placement stays, {why if saved_s > 0 else 'it still fits'}", **numbers)

    def _pays(self, saved_s: float, step_s: float) -> bool:
        """Whether a change that need not be made is worth it: a first step under a new placement compiles anew."""
        return saved_s > self.rules.gain * step_s and saved_s * (self._steps - self._number) > self._first_s

    def _tighten(self, text: str) -> bool:
        """Go over to a placement that takes less than the present one; False where there is none."""
        planner = self._the_planner()
        if planner is None:
            return self._tighten_unplanned(text)
        self._is_expected()
        least = self._peak_bytes
        for found, limit in self._smaller(planner, least):
            if found.placement != self.executor.placement and peak_of(found) < least:
                self._limit = min(self._limit, limit)
                numbers = {"expected_bytes": least, "threshold": -self.rules.cut, "limit_bytes": limit}
                if self._switch("out_of_memory", text, found, **numbers):
                    self._planned_for = self._allowed()
                    return True
        self._tell("out_of_memory", f"{text}; there is no tighter placement", expected_bytes=least)
        return False

    def _smaller(self, planner: Planner, peak_bytes: float) -> Iterable[tuple[Expected, float]]:
        """Plans for less and less, and the smallest."""
        limit = min(peak_bytes, self._allowed())
        for _ in range(CUTS):
            limit *= 1 - self.rules.cut
            found = planner.plan(limit, self._length, **self._factors)
            if found is None:
                break
            yield found, limit
        found = planner.smallest(self._length, memory_factor=self.memory_factor)
        if found is not None:
            yield found, peak_of(found)

    def _tighten_unplanned(self, text: str) -> bool:
        for placement in tighter(self.executor.placement, self._ladder):
            if self._place("out_of_memory", text, placement):
                return True
        self._tell("out_of_memory", f"{text}; there is no tighter placement")
        return False

    def _switch(self, trigger: str, text: str, found: Expected, **numbers: Any) -> bool:
        numbers |= {"peak_bytes": peak_of(found), "step_s": found.step_s}
        told = f"; {format_bytes(peak_of(found))} and {format_seconds(found.step_s)} a step expected"
        return self._place(trigger, text, found.placement, told, **numbers)

    def _place(self, trigger: str, text: str, placement: Placement, told: str = "", **numbers: Any) -> bool:
        """Go over to a placement; False where the executor cannot, and the old one runs on."""
        before, after = words(self.executor.placement), words(placement)
        try:
            self.executor.place(placement)
        except TilewrightError as error:
            self._tell(trigger, f"{text}; {after} was refused: {error.problems[0].what}", **numbers)
            return False
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            self._tell(trigger, f"{text}; no memory to go over to {after}", **numbers)
            return False
        self._tell(trigger, f"{text}: from {before} to {after}{told}", before=before, after=after, **numbers)
        self._begin_anew()
        self.executor.whole.free_memory()  # what the old one took is measured no more
        self._peaks()  # those up to now are of the old one
        return True

    def _begin_anew(self) -> None:
        """The placement is another one, or the rows' length: nothing measured up to now is of it."""
        self._expected, self._measured, self._under, self._relieved_at = None, 0.0, 0, 0

    # ---- what is known ----

    @property
    def expected_bytes(self) -> float | None:
        """What a step is expected to take at its peak now, corrected by what was measured; None where nobody knows."""
        return None if self._expected is None else self._peak_bytes

    def _the_planner(self) -> Planner | None:
        if not self._looked:
            self._planner, self._looked = self._find_planner(), True
            known, self._known = self._known, None
            if self._planner is not None and known is not None and self._expected is known:
                self._expected = self._planner.predict(self.executor.placement, self._length)
                # What was measured stays; the planner may say otherwise than who spoke before.
                self.memory_factor *= peak_of(known) / peak_of(self._expected)
                self.time_factor *= known.step_s / self._expected.step_s
        return self._planner

    def _allowed(self) -> float:
        return min(self._budget(), self._limit)

    def _fits(self, budget: float) -> bool:
        return not self._is_expected() or self._peak_bytes <= budget

    def _is_expected(self) -> bool:
        """Whether anything is known of what the present placement takes; a planner is asked where nothing is."""
        if self._expected is None and (planner := self._the_planner()) is not None:
            self._expected = planner.predict(self.executor.placement, self._length)
        return self._expected is not None

    @property
    def _factors(self) -> dict[str, float]:
        return {"memory_factor": self.memory_factor, "time_factor": self.time_factor}

    @property
    def _peak_bytes(self) -> float:
        """Of the present placement, corrected."""
        assert self._expected is not None, "ask _is_expected first"
        return self.memory_factor * peak_of(self._expected)

    @property
    def _step_s(self) -> float:
        assert self._expected is not None, "ask _is_expected first"
        return self.time_factor * self._expected.step_s

    def _tell(self, trigger: str, text: str, **numbers: Any) -> None:
        self._tell_event(self._number, f"{trigger.replace('_', ' ')}: {text}", trigger=trigger, **numbers)


def peak_of(expected: Expected) -> float:
    """Most bytes on the device in forward, backward and update."""
    sums = [sum(owners.values()) for name, owners in expected.phases.items() if name.startswith(STEP_PHASES)]
    return max(sums)


def length_of(microbatches: Sequence[Batch]) -> int | None:
    """Tokens of the longest row; None of images."""
    return max((batch["input_ids"].shape[1] for batch in microbatches if "input_ids" in batch), default=None)
