"""The first steps of a run, to time them: what `train.minutes` is counted in. Nothing of them is kept."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

from tilewright.planner.machine.microbench import WAITED
from tilewright.precision.policy.schedule import ModeSchedule
from tilewright.training.executor.evaluate import evaluate
from tilewright.training.planning.minutes import StepTimes
from tilewright.training.run import Run
from tilewright.training.runlog.signals import StopRequest

_SHARE = 0.01
"""Of the time of a run that is spent on timing, about."""
_MOST = 20
"""Steps that are timed."""


def time_steps(run: Run, stop: StopRequest) -> StepTimes | str:
    """Time the trial's steps of a run whose end is far away; why, where it was asked to stop.

    A recipe with two modes has some steps timed in each, and its step is the mean of both by their shares. 8-bit
    matmuls that begin or end at a share of the steps are timed as the run begins.

    Args:
        run: assembled, and thrown away afterwards. Of several ranks all do this, and find the same.
        stop: looked at between steps.
    """
    began, precision = time.perf_counter(), run.recipe.precision
    modes = run.parts.modes
    first = modes.schedule.start_mode
    budget_s = _SHARE * 60 * run.recipe.train.minutes / (1 if first is None else 2)
    share, rounds, worked_s = (0.0 if first is None else precision.start_fraction), [], 0.0
    for _ in range(1 if first is None else 2):
        tried = run.try_steps(stop, enough_within(budget_s))
        if run.asked_to_stop is not None:
            return run.asked_to_stop
        clock, processor = zip(*tried[1:], strict=True)  # the first one compiles
        rounds.append(clock)
        worked_s += sum(processor)
        modes.schedule, modes.next_step = ModeSchedule(modes.schedule.mode), run.step + 1
    step_s = share * statistics.median(rounds[0]) + (1 - share) * statistics.median(rounds[-1])
    eval_s = _evaluation_s(run) if run.recipe.train.eval_interval else 0.0
    all_s = sum(map(sum, rounds))
    waited = 1 - worked_s / all_s if run.setup.device.type == "cpu" and all_s > WAITED * worked_s else 0.0
    return StepTimes(step_s, sum(map(len, rounds)), time.perf_counter() - began, eval_s, waited)


def enough_within(budget_s: float) -> Callable[[Sequence[float]], bool]:
    """True where a trial's steps of so many seconds are enough: one after the first, and as many as fit into a budget.

    Example:
        >>> enough = enough_within(2.0)
        >>> enough([30.0]), enough([30.0, 9.0]), enough([30.0, 1.0]), enough([30.0, 1.0, 1.0])
        (False, True, False, True)
    """

    def enough(seconds: Sequence[float]) -> bool:
        return len(seconds) > 1 and (sum(seconds[1:]) >= budget_s or len(seconds) > _MOST)

    return enough


def _evaluation_s(run: Run) -> float:
    """Seconds of an evaluation in a trial, from one batch of it."""
    setup, data = run.setup, run.setup.world.data
    texts = run.parts.held_out_parts[0], setup.other_text
    batches = [batch for text in texts for rows in text.batches.values() for batch in rows]
    how = {"device": setup.device, "fp32": run.recipe.precision.eval_fp32, "data": data.handle}
    seconds = []
    with run.parts.executor.access.forward_passes(run.parts.model):
        for _ in range(2):  # the first one compiles
            began = time.perf_counter()
            evaluate(run.parts.model, {"": batches[:1]}, **how)
            seconds.append(time.perf_counter() - began)
    return seconds[-1] * math.ceil(len(batches) / data.size)
