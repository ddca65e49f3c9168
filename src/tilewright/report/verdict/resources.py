"""Rules on memory and time: are bytes and seconds as planned, does memory grow, do steps slow down, or wait?"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from statistics import median

from tilewright.core.units import format_bytes, format_seconds, format_share
from tilewright.report.run_data.clean_rows import number
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.run_data.run_numbers import planned_peak, quarters, training_peak
from tilewright.report.svg.axes import format_number, format_percent
from tilewright.report.verdict.rule import MIN_RECORDS, Verdict, VerdictRule
from tilewright.training.planning.off_plan import OFF
from tilewright.training.planning.off_plan import off_plan as off_plan_by

FEWEST_TIMED = 3
"""Steps after the first below which no seconds are judged."""
FEWEST_PEAKS = 8
"""Recorded peaks below which no growth is judged; only steps with a progress line have one."""

OFF_PLAN = VerdictRule(
    name="memory plan",
    chart="memory_bars",
    measures="difference of planned and measured peak of a training step, over the measured one",
    unit="share",
    look=0.1,
    bad=0.25,
    why=(
        "Plans of the shipped recipes are within 10 % of what was measured. With an error of a quarter a plan does not "
        "say whether a run fits."
    ),
)
OFF_PACE = VerdictRule(
    name="time plan",
    chart="throughput",
    measures=(
        "median seconds of the steps after the first over the planned ones (as corrected beside the first steps, where "
        "they were), or the inverse if that is more, which is worth a look at most"
    ),
    unit="times",
    look=OFF,
    bad=3.0,
    why=(
        "Steps of the shipped recipes take what is planned within a third. From 1.5 times on other programs run, or an "
        "operation is slow in its format here; at 3 times a job of five minutes takes fifteen. In a run that is "
        "faster than planned nothing is lost."
    ),
)
LEAK = VerdictRule(
    name="memory growth",
    chart="memory",
    measures=(
        "median peak of the last quarter over that of the second quarter, less one, in the longest part of the run "
        "without its first evaluation or its first save beside training"
    ),
    unit="share",
    look=0.05,
    bad=0.25,
    why=(
        "The first evaluation and the first save take buffers that stay. Otherwise, from the second quarter on, a step "
        "takes what the one before took; 5 % more is a leak or an allocator that fragments, and at 25 % in half a run "
        "memory may run out in a longer one."
    ),
)
WAIT = VerdictRule(
    name="data wait",
    chart="wait",
    measures="share of the time of all steps but the first spent waiting for data",
    unit="share",
    look=0.05,
    bad=0.25,
    why="Under 5 % is hard to tell from the scatter of steps; at 25 % the run would be a third faster without it.",
)
SLOWDOWN = VerdictRule(
    name="slowdown",
    chart="throughput",
    measures="largest share by which the median speed of a quarter of the run is below that of an earlier quarter",
    unit="share",
    look=0.1,
    bad=0.3,
    why="Steps of a run are alike, so a tenth is more than scatter: heat, other programs, memory that runs short.",
)
_QUARTERS = ("first", "second", "third", "last")


def off_plan(run: RunData) -> Verdict:
    """Rule on resources, memory: is the peak the planned one?"""
    (_, owners), measured = planned_peak(run), training_peak(run)
    if measured is None:
        return OFF_PLAN.not_measured("The memory of the run is not recorded.")
    planned = sum(owners.values())
    if planned <= 0 or measured <= 0:
        return OFF_PLAN.not_measured("No peak of a training step was planned.")
    if any(event.get("after") for event in run.kinds("replan")):
        return OFF_PLAN.not_measured("The memory plan was planned again during the run; see its table.")
    error = (planned - measured) / measured
    side = "above" if error >= 0 else "below"
    text = (
        f"The plan was {format_percent(abs(error))} {side} the measured peak: {format_bytes(planned)} planned, "
        f"{format_bytes(measured)} measured."
    )
    return OFF_PLAN.judge(abs(error), text)


def off_pace(run: RunData) -> Verdict:
    """Rule on resources, time: do steps take the planned seconds?"""
    planned, (_, seconds) = run.planned("step_s"), run.column("step_s")
    seconds = seconds[1:]  # the first one compiles
    if not planned:
        return OFF_PACE.not_measured("No seconds of a step were planned.")
    if any(event.get("after") for event in run.kinds("replan")):
        return OFF_PACE.not_measured("The memory plan was planned again during the run; see its table.")
    if len(seconds) < FEWEST_TIMED:
        return OFF_PACE.too_short(len(seconds), FEWEST_TIMED)
    found = median(seconds)
    if found <= 0:
        return OFF_PACE.not_measured("The time of the steps is not recorded.")
    text = f"A step took {format_seconds(found)}{_waited(run)}, {format_seconds(planned)} were planned."
    if corrected := run.corrected("step_s"):
        text += f" Rates of the machine, measured again beside the first steps, give {format_seconds(corrected)}."
        planned = corrected
    return OFF_PACE.judge(off_plan_by(planned, found), text, harmless=found < planned)


def _waited(run: RunData) -> str:
    """A remark on steps that waited while they were held against the plan, in brackets; empty where they did not, or
    nothing is known."""
    for event in reversed(run.kinds("pace")):
        worked, took = number(event.get("processor_s")), number(event.get("measured_s"))
        if worked is not None and took and worked < took:
            waited = format_share(1 - worked / took)
            return f" (the first ones waited for other programs, a disk or other ranks in {waited} of their time)"
    return ""


def leak(run: RunData) -> Verdict:
    """Rule on resources, memory: does the peak rise during the run?"""
    peaks = _longest_part(run)
    if len(peaks) < FEWEST_PEAKS:
        return LEAK.too_short(len(peaks), FEWEST_PEAKS)
    _, second, _, last = [median(part) for part in quarters(peaks)]
    if second <= 0:
        return LEAK.not_measured("The memory of the run is not recorded.")
    rise = last / second - 1
    if rise <= 0:
        return LEAK.judge(rise, f"The peak does not rise: {format_bytes(last)} in the last quarter.")
    text = f"The peak rose by {format_percent(rise)} from the second quarter to the last, to {format_bytes(last)}."
    return LEAK.judge(rise, text)


def _longest_part(run: RunData) -> list[float]:
    """The memory peaks of the longest part of a run, which evaluations and saves divide: their buffers stay
    allocated."""
    evaluations, saves = run.kinds("eval"), [event for event in run.kinds("save") if event.get("background")]
    steps = (
        [step for event in events if (step := number(event.get("step"))) is not None] for events in (evaluations, saves)
    )
    cuts = sorted(min(found) for found in steps if found)
    parts: list[list[float]] = [[] for _ in range(len(cuts) + 1)]
    for step, peak in zip(*run.column("memory_bytes"), strict=True):
        parts[bisect_right(cuts, step)].append(peak)
    return max(parts, key=len)


def wait(run: RunData) -> Verdict:
    """Rule on resources, time: how long do steps wait for data?"""
    pairs = [(number(row.get("wait_s")), number(row.get("step_s"))) for row in run.steps[1:]]
    times = [(waited, step) for waited, step in pairs if waited is not None and step is not None]
    if len(times) < MIN_RECORDS:
        return WAIT.too_short(len(times))
    waited = sum(time for time, _ in times)
    whole = waited + sum(step for _, step in times)
    if whole <= 0:
        return WAIT.not_measured("The time of the steps is not recorded.")
    text = f"{format_share(waited / whole)} of the time of the steps was spent waiting for data."
    return WAIT.judge(waited / whole, text)


def slowdown(run: RunData) -> Verdict:
    """Rule on resources, time: do steps become slower?"""
    _, speeds = run.column("tokens_per_s")
    if len(speeds) < MIN_RECORDS:
        return SLOWDOWN.too_short(len(speeds))
    parts = [median(part) for part in quarters(speeds)]
    if max(parts) <= 0:
        return SLOWDOWN.not_measured("No speed is recorded.")
    before, after = max(itertools.combinations(range(4), 2), key=lambda pair: _loss(parts, *pair))
    loss = _loss(parts, before, after)
    if loss <= 0:
        return SLOWDOWN.judge(
            0.0, f"No quarter was slower than one before: {format_number(parts[-1])} tokens/s at last."
        )
    return SLOWDOWN.judge(
        loss,
        f"{format_number(parts[after])} tokens/s in the {_QUARTERS[after]} quarter of the run, "
        f"{format_percent(loss)} below the {_QUARTERS[before]}.",
    )


def _loss(parts: Sequence[float], before: int, after: int) -> float:
    """Loss of speed, for the rule on resources: share by which a later part is slower."""
    return 1 - parts[after] / parts[before] if parts[before] > 0 else 0.0
