"""What a run is expected to take, as `plan.json`, the report, the dry run and training read it.

Needs no weights, no data and no GPU: shapes come from a model on the meta device, rates from `ceilings`. `make_plan`
prices a recipe as it stands; `summarize` says the same of any plan.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.memory_plan import STEP_PHASES
from tilewright.planner.advice.describe import verdict
from tilewright.planner.cost.links import unmeasured
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.roofline import binding
from tilewright.planner.plan import Budget, Plan, State
from tilewright.planner.planner import Planner


@dataclass(frozen=True)
class PlanSummary:
    """Predicted bytes and seconds of a run in the memory memory tracker's words. Bytes are of the device; seconds of
    one step.

    `phases`: bytes by owner (as in `memory.tracking.tracker`) at load, forward, backward, update, evaluate and
    checkpoint. `seconds`: of a step, by part. `bound_by`: compute or bandwidth, and the largest part under it.
    `unknown`: why the activations of the layers and the seconds are not known, and the bytes are the least that the run
    takes; else empty.
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
    verdict: str
    """The plan in a sentence."""
    notes: tuple[str, ...] = ()
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
        return max((name for name in self.phases if name in STEP_PHASES), key=self.phase_bytes)

    def phase_bytes(self, phase: str) -> int:
        """Bytes of all owners at a phase."""
        return sum(self.phases[phase].values())

    @property
    def state(self) -> State:
        """Whether the peak, and what the device holds too, is within the budget. What is known of a run may be too
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

    def to_json(self) -> dict[str, Any]:
        """Plain types for plan.json: the fields, and what follows from them; None where that is not known."""
        numbers = ("peak_phase", "peak_bytes", "step_phase", "step_s", "tokens_per_s")
        found = {name: None if self.unknown else getattr(self, name) for name in numbers}
        found |= {"state": self.state, "fits": self.fits}
        return found | asdict(self) | {"bound_by": list(self.bound_by)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "PlanSummary":
        """What `to_json` gave."""
        fields = {name: row[name] for name in cls.__dataclass_fields__}
        fields["bound_by"] = tuple(fields["bound_by"])
        fields["notes"] = tuple(fields["notes"])
        return cls(**fields)


def make_plan(recipe: Recipe, vocab_size: int, machine: Machine, rates: Ceilings) -> PlanSummary:
    """Price a recipe as it stands, links at guessed speeds.

    Args:
        recipe: the run's settings.
        vocab_size: of the tokenizer; classes for image classification.
        machine: where it would run; its memory is the budget unless `plan.device_memory` is set.
        rates: measured ceilings of that machine.

    Raises:
        ConfigError, CheckpointError: the model cannot be built.
    """
    device = recipe.plan.device_memory or machine.device_memory_bytes
    room = float(machine.host_memory_bytes)
    budget = Budget(float(device), room, unmeasured(machine), float("inf"))
    return summarize(Planner(recipe, vocab_size, machine, rates).as_it_stands(budget))


def summarize(found: Plan) -> PlanSummary:
    """Bytes by owner at the phases that the memory tracker measures, seconds, and the ceiling of most of them."""
    cuda = found.machine.device == "cuda"
    reserve = max(owners["process"] for owners in found.phases.values()) if cuda else 0.0
    named = {name: _owned(owners, reserve) for name, owners in found.phases.items()}
    backward, forward = _largest(named, "backward"), _largest(named, "forward")
    if not found.setting.can.whole_model:  # the head's backward pass follows its loss at once
        backward = max(backward, named["loss"], key=_sum)
    else:
        forward = max(forward, named["loss"], key=_sum)
    step = max((owners for name, owners in named.items() if name.startswith(STEP_PHASES[:-1])), key=_sum)
    phases = {
        "load": named["load"],
        "forward": forward,
        "backward": backward,
        "update": named.get("update", step if found.setting.can.whole_gradient else backward),
        "evaluate": named["evaluate"],
        "checkpoint": named["checkpoint"],
    }
    work = max(owners["work"] for owners in found.phases.values())
    return PlanSummary(
        device=found.machine.device,
        num_parameters=found.shape.num_parameters,
        phases=phases,
        other_parts={"process": int(found.phases["load"]["process"]), "work": int(work)},
        budget_bytes=int(found.budget.device),
        reserve_bytes=int(reserve),
        seconds=found.seconds,
        tokens_per_step=found.tokens_per_step,
        bound_by=binding(found.seconds),
        verdict=verdict(found),
        notes=found.notes,
        unknown=found.shape.unknown,
    )


def _owned(owners: Mapping[str, float], reserve: float) -> dict[str, int]:
    """By the memory tracker's owners."""
    named = {name: int(owners[name]) for name in ("parameters", "optimizer", "gradients", "activations", "buffers")}
    return named | {"other": int(owners["work"] + max(0.0, owners["process"] - reserve))}


def _sum(owners: Mapping[str, int]) -> int:
    return sum(owners.values())


def _largest(phases: Mapping[str, Mapping[str, int]], prefix: str) -> Mapping[str, int]:
    return max((owners for name, owners in phases.items() if name.startswith(prefix)), key=_sum)
