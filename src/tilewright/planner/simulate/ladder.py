"""Levers against idle time, turned on one after the other: what each of them brings, over several steps."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tilewright.core.errors import ConfigError
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.simulate.document_lengths import Lengths
from tilewright.planner.simulate.schedule_table import ScheduleTable
from tilewright.planner.simulate.simulated_step import CAUSES, SimulatedStep, idle_by_cause
from tilewright.planner.simulate.step_case import SimulatedCase
from tilewright.planner.simulate.torch_tables import Asked, torch_tables

Tables = Callable[[Sequence[Asked]], dict[Asked, ScheduleTable]]


@dataclass(frozen=True)
class Rung:
    """A case of a ladder, with its steps."""

    name: str
    case: SimulatedCase
    steps: tuple[SimulatedStep, ...]
    """Of one seed each."""
    why_not: str = ""
    """The schedule does not take this case; there are no steps then."""

    @property
    def idle(self) -> list[float]:
        """Idle share of each step on a rung of the ladder."""
        return [step.idle for step in self.steps]

    @property
    def seconds(self) -> float:
        """Seconds of a step on a rung of the ladder, median over the steps."""
        return statistics.median(step.seconds for step in self.steps)

    @property
    def padding(self) -> float:
        """Share of the computed work that is padding, on a rung of the ladder."""
        work = [math.fsum(map(math.fsum, step.costs.passes.work)) for step in self.steps]
        return round(statistics.median(1 - self.case.rows * self.case.count / one for one in work), 9) + 0.0

    def causes(self) -> dict[str, float]:
        """Idle share by cause on a rung of the ladder, means over the steps: they add up to the mean idle share."""
        found = [idle_by_cause(step) for step in self.steps]
        return {cause: statistics.fmean(one[cause] for one in found) for cause in CAUSES}

    def to_json(self) -> dict[str, object]:
        """Write a rung of the ladder for a result file: numbers of all steps."""
        if self.why_not:
            return {"name": self.name, "why_not": self.why_not}
        return {
            "name": self.name,
            "schedule": self.case.pipeline.schedule,
            "stages_per_rank": self.case.pipeline.virtual,
            "microbatches": self.case.count,
            "idle": {"median": statistics.median(self.idle), "min": min(self.idle), "max": max(self.idle)},
            "idle_of_steps": self.idle,
            "seconds": self.seconds,
            "padding": self.padding,
            "exposed": statistics.median(step.exposed for step in self.steps),
            "peak_activations": max(max(step.peaks) for step in self.steps),
            "causes": self.causes(),
        }


def ladder_cases(case: SimulatedCase) -> list[tuple[str, SimulatedCase]]:
    """The ladder's levers, each with the case that has it and all before it. Schedules replace each other.

    Args:
        case: with all that is not turned on: ranks, links, costs. Its schedule does not matter.
    """
    pp = case.pipeline.pp
    plain = replace(case, pipeline=Pipeline(pp), packing="padded", by_speed=False, split="even")
    found = [("fixed number of documents, padded, 1F1B", plain)]
    found.append(("documents as long as they are", replace(plain, packing="fixed")))
    found.append(("balanced by tokens", replace(plain, packing="tokens")))
    found.append(("balanced by cost", replace(plain, packing="cost")))
    if not case.is_even:
        found.append(("rows get documents by their speed", replace(found[-1][1], by_speed=True)))
    balanced = found[-1][1]
    schedules = [
        ("interleaved, 2 stages per rank", Pipeline(pp, "interleaved", 2)),
        ("interleaved, 4 stages per rank", Pipeline(pp, "interleaved", 4)),
        ("zero bubble, 1 stage per rank (ZB-H1)", Pipeline(pp, "interleaved_zero_bubble", 1)),
        ("zero bubble, interleaved, 2 stages per rank", Pipeline(pp, "interleaved_zero_bubble", 2)),
        ("zero bubble, V (ZBV)", Pipeline(pp, "zbv", 2)),
    ]
    found += [(name, replace(balanced, pipeline=pipeline)) for name, pipeline in schedules]
    return found


def climb(
    case: SimulatedCase, lengths: Lengths, seeds: Sequence[int], documents: int, tables: Tables | None = None
) -> list[Rung]:
    """Climb the ladder of levers from a case.

    Args:
        case: as `ladder_cases` takes it.
        lengths: of documents.
        seeds: of the steps.
        documents: per micro-batch, on average.
        tables: of schedules; None: torch's.

    Raises:
        ConfigError: no schedule takes the case.
    """
    cases = ladder_cases(case)
    taken = [one for _, one in cases if _why_not(one) == ""]
    found = (tables or torch_tables)([(one.pipeline, one.count) for one in taken])
    rungs = [_rung(name, one, found, lengths, seeds, documents) for name, one in cases]
    if not case.is_even:
        best = min((rung for rung in rungs if rung.steps and rung.case.by_speed), key=lambda rung: rung.seconds).case
        for name, again in (
            ("layers split again, the same in all rows", replace(best, split="same")),
            ("layers split again, each row its own (a bound)", replace(best, split="own")),
        ):
            rungs.append(_rung(name, again, found, lengths, seeds, documents))
    return rungs


def simulated(
    name: str,
    case: SimulatedCase,
    lengths: Lengths,
    seeds: Sequence[int],
    documents: int,
    table: ScheduleTable | None = None,
) -> Rung:
    """One case, as a ladder of one rung.

    Args:
        name: of it.
        case: what is simulated.
        lengths: of documents.
        seeds: of the steps.
        documents: per micro-batch, on average.
        table: of the schedule; None: torch's.

    Raises:
        ConfigError: the schedule does not take the case, or passes of the table wait for each other.
    """
    asked = (case.pipeline, case.count)
    found = torch_tables([asked])[asked] if table is None else table
    return Rung(name, case, tuple(_steps(case, found, lengths, seeds, documents)))


def _steps(
    case: SimulatedCase, table: ScheduleTable, lengths: Lengths, seeds: Sequence[int], documents: int
) -> Iterator[SimulatedStep]:
    for seed in seeds:
        yield SimulatedStep.of(table, case.costs(lengths.draw(case.rows * case.count * documents, seed)))


def _rung(
    name: str,
    case: SimulatedCase,
    tables: dict[Asked, ScheduleTable],
    lengths: Lengths,
    seeds: Sequence[int],
    documents: int,
) -> Rung:
    if why_not := _why_not(case):
        return Rung(name, case, (), why_not)
    return Rung(name, case, tuple(_steps(case, tables[case.pipeline, case.count], lengths, seeds, documents)))


def _why_not(case: SimulatedCase) -> str:
    """Why the schedule of a rung does not take the case, or nothing."""
    try:
        case.pipeline.check_count(case.count)
        case.splits()
    except ConfigError as error:
        return f"{error.problems[0].what}: {error.problems[0].got}"
    return ""
