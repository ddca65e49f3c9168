"""Simulated steps in words and rows of tables, for the terminal and the page."""

import statistics
from collections.abc import Sequence

from tilewright.core.units import format_seconds, format_share
from tilewright.planner.simulate.ladder import Rung
from tilewright.planner.simulate.schedule_formulas import Failures
from tilewright.planner.simulate.simulated_step import SimulatedStep
from tilewright.planner.simulate.step_case import SimulatedCase

LADDER_COLUMNS = ("lever", "idle", "least", "greatest", "step", "times as fast", "padding", "exposed", "activations")
ABOUT = (
    "Order of passes: torch's own schedules, as built by the torch that is installed.",
    "What passes cost is given, not measured: documents cost their tokens and the square of them over --attention.",
    "Messages travel while ranks compute; those that share a link follow each other. Sending takes no time of a rank.",
    "Activations are counted in micro-batches of mean cost through all layers of a rank with an equal share.",
    "Left out: the traffic of shards (FSDP), of tensor and expert parallelism, and recomputation.",
)


def failures_words(failures: Failures) -> str:
    """Describe the failures of a simulated run in words: goodput and its parts.

    Example:
        >>> failures_words(Failures(every_s=9720.0, interval_s=900.0, recover_s=900.0))
        'goodput 87.0 %: a failure every 2h42m, checkpoints every 15m00s that stall 0 s, 15m00s to recover'
    """
    best = failures.best_interval_s
    text = f"goodput {format_share(failures.goodput)}: a failure every {format_seconds(failures.every_s)}, checkpoints "
    text += f"every {format_seconds(failures.interval_s)} that stall {format_seconds(failures.stall_s)}, "
    text += f"{format_seconds(failures.recover_s)} to recover"
    return text + (f"; best every {format_seconds(best)}" if best else "")


def setting_of(case: SimulatedCase) -> str:
    """Describe the ranks and micro-batches of a simulated case.

    Example:
        >>> from tilewright.parallel.pipeline.stage_split import Pipeline
        >>> setting_of(SimulatedCase(Pipeline(8), rows=4, count=32, speeds=(0.8,) + (1.0,) * 31))
        'pp 8 x dp 4, 32 micro-batches per row, rank 0 at 0.8'
    """
    slow = [f"rank {rank} at {speed:g}" for rank, speed in enumerate(case.speeds) if speed != 1.0]
    named = slow if len(slow) <= 4 else [f"{len(slow)} ranks at other speeds"]
    return ", ".join((f"pp {case.pipeline.pp} x dp {case.rows}, {case.count} micro-batches per row", *named))


def ladder_row(rung: Rung, first: Rung) -> list[str]:
    """Write a rung of the simulated ladder as a row: cells of `LADDER_COLUMNS`."""
    if rung.why_not:
        return [rung.name, f"not possible: {rung.why_not}", *[""] * (len(LADDER_COLUMNS) - 2)]
    exposed = statistics.median(step.exposed for step in rung.steps)
    faster = f"{first.seconds / rung.seconds:.2f}" if first.steps else ""
    shares = [format_share(one) for one in (statistics.median(rung.idle), min(rung.idle), max(rung.idle))]
    peak = max(max(step.peaks) for step in rung.steps)
    return [
        *(rung.name, *shares, format_seconds(rung.seconds), faster),
        *(format_share(rung.padding), format_share(exposed), f"{peak:.1f}"),
    ]


def ladder_verdict(rungs: Sequence[Rung]) -> str:
    """Describe the simulated ladder in one sentence: idle time and seconds of its first and its last rung."""
    every = [rung for rung in rungs if rung.steps]
    done = [rung for rung in every if rung.case.split != "own"] or every  # which no run does
    last = min(done, key=lambda rung: rung.seconds)
    idle = format_share(statistics.median(last.idle))
    if len(done) == 1:
        return f"A step takes {format_seconds(last.seconds)}, and ranks are idle for {idle} of it"
    first = max(done, key=lambda rung: statistics.median(rung.idle))
    before, faster = format_share(statistics.median(first.idle)), first.seconds / last.seconds
    return f"Idle: {before} of a step with {first.name}, {idle} with {last.name}, which is {faster:.2f} times as fast"


def causes_row(rung: Rung) -> list[str]:
    """Write the idle time of a simulated step as a row: a name, the idle share of each cause, and their sum."""
    causes = [round(share, 9) + 0.0 for share in rung.causes().values()]  # what rounding leaves is nothing
    return [rung.name, *map(format_share, causes), format_share(sum(causes))]


def critical_words(step: SimulatedStep) -> str:
    """Describe the critical path of a simulated step: the ranks whose passes decide how long it takes."""
    seconds: dict[int, float] = {}
    for row, place in step.critical_path():
        times = step.timeline.rows[row][place[0]][place[1]]
        number = step.costs.world_rank(row, place[0])
        seconds[number] = seconds.get(number, 0.0) + times.end_s - times.begin_s
    ranked = sorted(seconds, key=lambda number: (-seconds[number], number))[:3]
    parts = [f"rank {number} {format_share(seconds[number] / step.seconds)}" for number in ranked]
    waits = 1 - sum(seconds.values()) / step.seconds
    return f"{', '.join(parts)}; between passes {format_share(waits)}"
