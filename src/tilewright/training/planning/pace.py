"""Seconds of a run beside the plan's: how long it will take, before it starts; steps that are far off, early.

Steps that are far off have one of three causes. Other programs have the processors: the steps take what was planned of
a processor's time, and longer by the clock. The rates that the plan rests on are not this machine's of now: they are
measured again, and the plan is corrected once where it is nearer then (`pace_of`). Or something is slow that no rate
tells.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.json_text import from_json
from tilewright.core.log import say
from tilewright.core.units import format_seconds, format_share
from tilewright.planner.cost.mode_speed import slow_mode_notes
from tilewright.planner.machine.ceilings import DTYPES, Ceilings
from tilewright.planner.machine.microbench import WAITED
from tilewright.planner.machine.remeasure import measured_again, reached
from tilewright.planner.model.gemms import multiplied_in
from tilewright.planner.model.roofline import BOUND_BY
from tilewright.planner.plan import Plan
from tilewright.planner.site import Site
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.step_hook import Step, StepHook
from tilewright.training.planning.minutes import long_run
from tilewright.training.planning.off_plan import OFF, off_plan

COUNTED = 4
"""Steps of a process that are held against the plan: the first one, which compiles, and three more."""
PLAN_JSON = "plan.json"
MULTIPLIED = ("matmuls", "recompute", "head")
"""Parts of a step at the rates of its matmuls."""
WORTH_S = 30.0
"""Seconds by which the end of the run is off, from which on rates are measured again, which takes some."""


def told_before(
    recipe: Recipe, done: int, step_s: float, rates: Ceilings, machine: Machine
) -> Iterator[tuple[str, str]]:
    """Remarks on a run's pace before it starts, as (kind of event, text): that it will take long, that its mode is
    slower than fp32 on its machine.

    Args:
        recipe: its steps known.
        done: steps.
        step_s: planned seconds of a step; 0 where they are not known.
        rates, machine: where it runs.
    """
    if text := long_run(recipe.train, done, step_s):
        yield "long", text
    for text in slow_mode_notes(recipe, rates, machine):
        yield "slow_mode", text


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of the first steps of a process: the middle one's, the first step left out. `processor`: of the calling
    thread; where it says nothing of the work (a GPU), the same as `clock`."""

    clock: float
    processor: float

    @classmethod
    def of(cls, clock: Sequence[float], processor: Sequence[float], *, on_cpu: bool) -> "StepSeconds":
        """The pace in seconds of the first `COUNTED` steps in the mode that was planned; the first one compiles, and
        does not count."""
        seconds = median(clock[1:])
        return cls(seconds, median(processor[1:]) if on_cpu else seconds)

    @property
    def shared(self) -> bool:
        """True if the thread of a run's pace waited for long: for other programs, a disk, other ranks."""
        return self.clock > WAITED * self.processor > 0

    @property
    def own(self) -> float:
        """The seconds of the steps by their own pace, if the thread had not waited."""
        return self.processor if self.shared else self.clock


@dataclass(frozen=True)
class PlannedSeconds:
    """Planned seconds of a step; 0 where they are not known. `moved`: those of links and other ranks, in which no
    processor works."""

    step: float
    moved: float = 0.0

    def off(self, found: StepSeconds) -> float:
        """How far off the plan the steps' own pace is."""
        return off_plan(max(self.step - self.moved, 1e-9) if found.shared else self.step, found.own)


def hold_against_plan(
    record_event: Callable[..., None],
    planned: PlannedSeconds,
    found: StepSeconds,
    step: int,
    steps: int,
    correct: Callable[[float], float] | None = None,
) -> float | None:
    """Hold a run's pace against the plan: record where the first steps of a process are far off the plan; give the
    seconds of a step by the corrected plan, where it was corrected: where rates that are measured again bring it nearer
    to the steps.

    Args:
        record_event: step, kind, text, numbers.
        planned: before.
        found: measured.
        step: steps done.
        steps: of the run.
        correct: gives the seconds of a step by rates that are measured now, from what the steps' own work takes; None:
            they cannot be measured here.
    """
    left = steps - step
    if not planned.step or off_plan(planned.step, found.clock) < OFF:
        return None
    times = found.clock / planned.step
    text = f"steps take {format_seconds(found.clock)}, {times:.2g} times the planned {format_seconds(planned.step)}"
    numbers = {"planned_s": planned.step, "measured_s": found.clock, "processor_s": found.own, "threshold": OFF}
    far, corrected = planned.off(found) >= OFF, None
    if far and correct is not None and abs(left * (found.clock - planned.step)) > WORTH_S:
        again = correct(found.own)
        text += f". Rates of this machine, measured again beside them, give {format_seconds(again)}"
        if replace(planned, step=again).off(found) < planned.off(found):
            corrected, change = again, again / planned.step
            text += f": the plan is corrected, to {change:.2g} times what it was"
            numbers |= {"corrected_s": corrected, "correction": change}
        else:  # steps of a small model take what no rate tells
            text += ", which is no nearer: the plan stays"
            numbers |= {"again_s": again}
    if left:
        text += f": the {f'{left:,} that are left take' if left > 1 else 'last one takes'} "
        text += format_seconds(left * found.clock)
    if found.shared:
        as_planned = "" if far else ", as planned"
        text += (
            f". In {format_share(found.own / found.clock)} of that they have a processor{as_planned}; in the rest they "
            "wait for other programs, a disk or other ranks"
        )
    elif times > 1 and corrected is None:
        text += ". Other programs, or a format that this machine is slow in (tilewright doctor), may be the cause"
    record_event(step, "pace", text, **numbers)
    return corrected


class Pace(StepHook):
    """Says where steps are far off the plan, once.

    Args:
        planned: of a step.
        first: step, counted from 1, from which on the process runs what was planned.
        steps: of the run.
        on_cpu: where the steps are computed.
        correct: see `hold_against_plan`.
        keep: given the seconds of a step by the corrected plan, where it was corrected.
    """

    def __init__(
        self,
        planned: PlannedSeconds,
        first: float,
        steps: int,
        *,
        on_cpu: bool,
        correct: Callable[[float], float] | None,
        keep: Callable[[Step, float], None],
    ) -> None:
        self._planned, self._steps, self._on_cpu = planned, steps, on_cpu
        self._correct, self._keep = correct, keep
        self._first, self.next_step = first, first + COUNTED - 1

    def after_step(self, step: Step, result: StepResult) -> None:
        """Compare the pace of the step and those before it. One that was skipped says nothing: it may not have been
        computed."""
        if step.number < self.next_step:
            return
        taken = [seconds for number, *seconds in step.recorder.log.recent if number >= self._first][-COUNTED:]
        if len(taken) < COUNTED:
            return
        self.next_step = math.inf
        clock, processor = zip(*taken, strict=True)
        found = StepSeconds.of(clock, processor, on_cpu=self._on_cpu)
        corrected = hold_against_plan(
            step.recorder.event, self._planned, found, step.number, self._steps, self._correct
        )
        if corrected is not None:
            self._keep(step, corrected)


# ---- the plan corrected ----


def pace_of(plan: Plan, site: Site, first: float, steps: int, *, measures: bool) -> Pace:
    """The pace of a run held against its plan, which it corrects where its rates are wrong.

    Args:
        plan, site: of the run.
        first: step, counted from 1, from which on the process runs what was planned.
        steps: of the run.
        measures: whether this process may measure rates: of several the first one.
    """
    moved = sum(seconds for part, seconds in plan.seconds.items() if BOUND_BY[part] == "transfers")
    on_cpu = site.machine.device == "cpu"  # on a GPU there is no room for measurements beside a run
    return Pace(
        PlannedSeconds(plan.known_step_s, moved),
        first,
        steps,
        on_cpu=on_cpu,
        correct=corrector(plan, site) if measures and on_cpu else None,
        keep=keep_corrected,
    )


def corrector(plan: Plan, site: Site) -> Callable[[float], float]:
    """Return a function that predicts the seconds of a plan's step at rates measured when it is called, from the time
    that the steps' work took. A step is not faster than its matmuls: where they alone are planned to take longer, they
    are faster."""

    def correct(own_s: float) -> float:
        formats = formats_of(plan, site.rates)
        rates = measured_again(site.machine, site.rates, formats, progress=say)
        found = at_rates(plan, site, rates)
        times = sum(found.seconds.get(part, 0.0) for part in MULTIPLIED) / own_s
        if times > 1:
            found = at_rates(plan, site, reached(site.machine, rates, formats, times))
        return found.step_s

    return correct


def formats_of(plan: Plan, rates: Ceilings) -> frozenset[str]:
    """Formats whose rates decide a run's pace: those of its matmuls, and those that operands are converted to."""
    shape, units = plan.shape, rates.matmul
    layers = (*shape.classes, shape.rest)
    used = {multiplied_in(form, units) for layer in layers for matmul in layer.matmuls for form in matmul.gemms.formats}
    used |= {shape.matmul_format} | ({shape.direction_format} if plan.setting.optimizer == "muon" else set())
    return frozenset("fp32" if name not in DTYPES else name for name in used)


def at_rates(plan: Plan, site: Site, rates: Ceilings) -> Plan:
    """A plan at other rates, for a run's pace: with the seconds that they give it, in proportion to what the planner
    says of both."""

    def priced(at: Ceilings) -> float:
        planner = replace(site, rates=at, finder=site.shapes).planner(plan.recipe).with_shape(plan.shape)
        return planner.priced(plan.setting, plan.memory_plan, plan.budget).step_s

    return plan.scaled(1.0, priced(rates) / priced(site.rates))


def keep_corrected(step: Step, corrected_s: float) -> None:
    """Write the corrected pace of a run, seconds per step beside the planned ones, in its plan.json."""
    path = step.folder.path / PLAN_JSON
    plan = from_json(path.read_text(encoding="utf-8"))
    tokens_per_s = plan["tokens_per_step"] / corrected_s
    corrected = {"step": step.number, "step_s": corrected_s, "tokens_per_s": tokens_per_s}
    step.folder.write_json(PLAN_JSON, plan | {"corrected": corrected})
