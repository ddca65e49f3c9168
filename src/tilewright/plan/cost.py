"""The plan of a run: whether it fits, how fast it will be, what binds, and the cheapest changes that make it fit.

Needs no weights, no data and no GPU: shapes come from a model on the meta device, rates from `ceilings`. `make_plan` is
called by `training` before a run, by the command line (`plan`), and by the benchmark that holds it against real runs.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.units import format_bytes, format_count, format_seconds
from tilewright.memory.table import phase_table
from tilewright.plan.ceilings import Ceilings
from tilewright.plan.fixes import Fix, find_fixes
from tilewright.plan.footprint import footprint
from tilewright.plan.layer_major import layer_major_footprint
from tilewright.plan.moments import FRAGMENTS
from tilewright.plan.roofline import binding, step_seconds
from tilewright.plan.traced import traced_footprint
from tilewright.plan.workload import Planner, Workload

State = Literal["fits", "does not fit", "not known"]
STEP_PHASES = ("load", "forward", "backward", "update")
"""Phases that the memory ledger measures in every step."""


@dataclass(frozen=True)
class Plan:
    """Predicted bytes and seconds of a run. Bytes are of the device; seconds of one optimizer step.

    `phases`: bytes by owner (as in `memory.ledger`) at load, forward, backward, update, evaluate and checkpoint.
    `seconds`: of a step, by part. `bound_by`: compute or bandwidth, and the largest part under it. `unknown`: why the
    activations of the layers and the seconds are not known, and the bytes are the least that the run takes; else empty.
    """

    device: str
    num_parameters: int
    phases: Mapping[str, Mapping[str, int]]
    other_parts: Mapping[str, int]
    budget_bytes: int
    reserve_bytes: int
    seconds: Mapping[str, float]
    tokens_per_step: int
    bound_by: tuple[str, str]
    notes: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()
    unknown: str = ""

    @property
    def peak_phase(self) -> str:
        """The phase with the most bytes."""
        return max(self.phases, key=self.phase_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes at any phase."""
        return self.phase_bytes(self.peak_phase)

    @property
    def step_phase(self) -> str:
        """The phase of a training step with the most bytes; evaluation and checkpoints left out."""
        return max(STEP_PHASES, key=self.phase_bytes)

    def phase_bytes(self, phase: str) -> int:
        """Bytes of all owners at a phase."""
        return sum(self.phases[phase].values())

    @property
    def state(self) -> State:
        """Whether the peak, and what the device holds besides, is within the budget. What is known of a run may be too
        much already where the rest is not known."""
        if self.peak_bytes + self.reserve_bytes > self.budget_bytes:
            return "does not fit"
        return "not known" if self.unknown else "fits"

    def fits_with(self, margin: float) -> bool:
        """Whether the peak leaves so much of the budget free: only then is a run as its recipe says."""
        return self.peak_bytes + self.reserve_bytes <= (1 - margin) * self.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether the run is known to fit."""
        return self.state == "fits"

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens (of images: rows) a second."""
        return self.tokens_per_step / self.step_s

    @property
    def verdict(self) -> str:
        """The plan in a sentence."""
        return _verdict(self)

    def table(self) -> str:
        """The plan as plain text for people."""
        return _table(self)

    def to_json(self) -> dict[str, Any]:
        """Plain types for plan.json: the fields, and what follows from them; None where that is not known."""
        numbers = ("peak_phase", "peak_bytes", "step_phase", "step_s", "tokens_per_s")
        found = {name: None if self.unknown else getattr(self, name) for name in numbers}
        found |= {"state": self.state, "fits": self.fits, "verdict": self.verdict}
        return found | asdict(self) | {"bound_by": list(self.bound_by)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Plan":
        """What `to_json` gave."""
        fields = {name: row[name] for name in cls.__dataclass_fields__}
        fields["bound_by"] = tuple(fields["bound_by"])
        fields["notes"] = tuple(fields["notes"])
        fields["fixes"] = tuple(Fix(**fix) for fix in fields["fixes"])
        return cls(**fields)


def make_plan(recipe: Recipe, vocab_size: int, machine: Machine, rates: Ceilings, *, fixes: bool = True) -> Plan:
    """Plan a run.

    Args:
        recipe: the run's settings.
        vocab_size: of the tokenizer; classes for image classification.
        machine: where it would run; its memory is the budget unless `plan.device_budget` is set.
        rates: measured ceilings of that machine.
        fixes: look for changes that make it fit where it does not.

    Raises:
        ConfigError, CheckpointError: the model cannot be built.
    """
    planner = Planner(vocab_size, machine)
    plan = _plan(planner.workload(recipe), rates)
    if plan.fits or plan.unknown or not fixes:
        return plan

    def fix(other: Recipe, settings: dict[str, Any], keeps_result: bool) -> Fix:
        smaller = Planner(settings["data.vocab_size"], machine) if "data.vocab_size" in settings else planner
        tried = _plan(smaller.workload(other), rates)
        fits = tried.fits and tried.fits_with(other.plan.margin)
        return Fix(settings, keeps_result, fits, tried.peak_bytes, tried.step_s, 1 / tried.tokens_per_s)

    return Plan(**{**_fields(plan), "fixes": find_fixes(recipe, fix)})


def _fields(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


def _plan(work: Workload, rates: Ceilings) -> Plan:
    if work.recipe.memory.executor == "layer_major":
        bytes_ = layer_major_footprint(work)
    else:
        bytes_ = traced_footprint(work) if work.trace is not None else footprint(work)
    seconds = step_seconds(work, rates)
    budget = work.recipe.plan.device_budget or work.machine.device_memory_bytes
    lost = 0 if work.machine.device == "cpu" else int(FRAGMENTS * budget)
    return Plan(
        device=work.machine.device,
        num_parameters=work.num_parameters,
        phases=bytes_.phases,
        other_parts=bytes_.other_parts,
        budget_bytes=budget,
        reserve_bytes=bytes_.reserve_bytes + lost,
        seconds=seconds,
        tokens_per_step=work.step_tokens,
        bound_by=binding(seconds),
        notes=_notes(work),
        unknown=work.trace.trouble if work.trace is not None else "",
    )


def _notes(work: Workload) -> tuple[str, ...]:
    """What the plan does not know."""
    notes = []
    if work.trace is not None:
        notes += work.trace.notes
    if work.trace is not None and work.compiled:
        notes.append("activations are those of eager layers; compiled ones keep less")
    memory = work.recipe.memory
    away = [name for name in ("parameters", "states", "inputs") if getattr(memory, name) != "device"]
    if memory.executor == "layer_major" and away:
        notes.append(f"what {', '.join(away)} wait for on their way from and to their tiers is not in the seconds")
    if work.machine.device == "cuda":
        notes.append("no CUDA device has been measured for these constants; expect a larger error")
    return tuple(notes)


def _verdict(plan: Plan) -> str:
    """Whether it fits, at which phase the peak is and whose, and how fast a step is, in a sentence."""
    needs, budget = format_bytes(plan.peak_bytes + plan.reserve_bytes), format_bytes(plan.budget_bytes)
    if plan.state == "not known":
        return f"It is not known whether the run fits: {plan.unknown}. It takes more than {needs} of {budget}."
    if plan.unknown:
        return (
            f"The run does not fit: it takes more than {needs} of {budget}, and how much is not known ({plan.unknown})."
        )
    owners = plan.phases[plan.peak_phase]
    largest = max(owners, key=lambda owner: owners[owner])
    verb = "The run fits" if plan.fits else "The run does not fit"
    text = f"{verb}: {needs} of {budget} at the peak ({plan.peak_phase}, mostly {largest})"
    ceiling, part = plan.bound_by
    speed = f"{format_count(plan.tokens_per_s)} tokens/s, bound by {ceiling} ({part})"
    return f"{text}; a step takes about {format_seconds(plan.step_s)}, {speed}."


def _table(plan: Plan) -> str:
    """Verdict, bytes by owner and phase, seconds by part, notes, and fixes where it does not fit."""
    lines = [plan.verdict, "", f"{format_count(plan.num_parameters)} parameters on {plan.device}", ""]
    lines += phase_table(plan.phases)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.other_parts.items() if size)
    lines += [f"  other: {parts}"] if parts else []
    lines += [f"  outside the allocator: {format_bytes(plan.reserve_bytes)}"] if plan.reserve_bytes else []
    if plan.unknown:
        lines.append("  activations, and what operations need while they run, are not in these bytes")
    else:
        lines += ["", *_seconds_lines(plan)]
    lines += [f"note: {note}" for note in plan.notes]
    if plan.fixes:
        lines += ["", "What makes it fit, cheapest first:" if plan.fixes[0].fits else "Nothing fits; closest:"]
        lines += [f"  {fix}" for fix in plan.fixes]
    return "\n".join(lines)


def _seconds_lines(plan: Plan) -> list[str]:
    """Seconds by part, the most first."""
    lines = [f"{'seconds':<12}{'of a step':>12}{'share':>8}"]
    for name, seconds in sorted(plan.seconds.items(), key=lambda item: -item[1]):
        if seconds:
            lines.append(f"{name:<12}{format_seconds(seconds):>12}{seconds / plan.step_s:>8.0%}")
    return [*lines, f"{'sum':<12}{format_seconds(plan.step_s):>12}{format_count(plan.tokens_per_s):>10} tokens/s"]
