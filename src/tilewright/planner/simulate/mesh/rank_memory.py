"""Bytes of a rank by phase and owner: the phases of a plan of one device, for what the rank holds of the model.

What a pipeline adds: activations of all micro-batches that its schedule has in flight on the rank; a gradient of the
residual stream that is received; and where weight gradients wait, the gradients of outputs that they are made of.
No update of the optimizer and no gather overlaps with another owner's peak in a way that phases do not have.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tilewright.core.memory_plan import LayerMemory
from tilewright.planner.cost.layer_choices import GlobalConfig
from tilewright.planner.cost.layer_cost import GemmCost, LayerParts, end_class
from tilewright.planner.cost.owners import owners_at
from tilewright.planner.cost.plan_rows import PlanRow
from tilewright.planner.cost.solve_layers import Cost
from tilewright.planner.cost.step_phases import FRAGMENTS, OffloadFlags, phases
from tilewright.planner.model.model_shape import LayerClass, ModelShape
from tilewright.planner.simulate.mesh.mesh_model import NO_LINKS, MeshModel, StageLayers, part_of
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting

Owners = Mapping[str, float]
_DEVICE = OffloadFlags(is_offloaded=False, on_disk=False)


@dataclass(frozen=True)
class InFlight:
    """The micro-batches that a schedule has under way on a rank, at most."""

    micro_batches: float
    """Whose activations the rank keeps, each through all of its layers."""
    waiting: float = 0.0
    """Whose gradients of inputs are done and those of weights are not, counted likewise."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank."""

    phases: Mapping[str, Owners]
    """By phase and owner, as a plan has them."""

    def with_flight(self, extra: "Extra", flight: InFlight) -> "RankMemory":
        """This memory of a rank with what a schedule has in flight."""
        more = (flight.micro_batches - 1) * extra.kept + flight.waiting * extra.waiting
        found = {
            name: {**owners, "activations": owners["activations"] + more, "work": owners["work"] + extra.received}
            if name in extra.in_flight
            else owners
            for name, owners in self.phases.items()
        }
        return RankMemory(found)

    @cached_property
    def peak(self) -> float:
        """Bytes of a rank's memory in the busiest phase."""
        return max(sum(owners.values()) for owners in self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The busiest phase of a rank's memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def owners(self) -> Owners:
        """Bytes of a rank's memory in the busiest phase, by owner."""
        return self.phases[self.peak_phase]


@dataclass(frozen=True)
class Extra:
    """The bytes of one micro-batch that a schedule adds to a rank's phases."""

    kept: float
    """From forward to backward."""
    waiting: float
    """Between the gradient of the input and those of the weights."""
    received: float
    """A gradient of the residual stream."""
    in_flight: frozenset[str]
    """Phases in which micro-batches are under way."""


def rank_memory(
    model: MeshModel, setting: MeshSetting, held: StageLayers, device_bytes: float
) -> tuple[RankMemory, Extra]:
    """The memory of a rank for one micro-batch in flight, and for each further one.

    Args:
        model: of the run.
        setting: of all ranks.
        held: what this one holds.
        device_bytes: of its budget, of which an allocator loses a share.
    """
    whole, recipe = model.shape(model.key(setting.master, setting.sizes)), model.recipe_with(setting.master)
    shape, config = part_of(whole, held), model.config(setting)
    ends = [
        end_class(name, weights, shape)
        for name, weights in (("embedding", shape.embedding), ("head", shape.head))
        if weights.count
    ]
    rows = [_row(found, model, setting, config, shape) for found in (*shape.classes, *ends)]
    named = phases(shape, config, recipe, model.machine, frozenset(found.name for found in ends), _DEVICE)
    cpu, found = model.machine.device == "cpu", {}
    for phase in named:
        owners = owners_at(phase, rows)
        owners["process"] += 0.0 if cpu else FRAGMENTS * device_bytes
        found[phase.name] = owners
    stream = float(setting.rows * shape.seq_len * shape.dim * shape.stream_bytes)
    staged = setting.sizes.pp > 1
    extra = Extra(
        math.fsum(row.count * row.cost.kept for row in rows if row.indices),
        _waiting_bytes(shape, setting),
        stream if staged else 0.0,
        frozenset(phase.name for phase in named if phase.kept and not phase.freed) if staged else frozenset(),
    )
    return RankMemory(found), extra


def _row(
    found: LayerClass,
    model: MeshModel,
    setting: MeshSetting,
    config: GlobalConfig,
    shape: ModelShape,
) -> PlanRow:
    """A row of the rank's memory, bytes alone: seconds are those of passes."""
    is_end = found.indices == (-1,)
    choice = LayerMemory() if is_end else LayerMemory(activations=setting.activations)
    recipe = model.recipe_with(setting.master)
    matmuls = GemmCost(found, setting.rows, shape, model.rates)
    parts = LayerParts(found, choice, config, shape, recipe, model.rates, NO_LINKS, matmuls)
    return PlanRow(found.name, () if is_end else found.indices, choice, Cost.of(0.0, parts.holdings()))


def _waiting_bytes(shape: ModelShape, setting: MeshSetting) -> float:
    """The bytes that wait on a rank per micro-batch until weight gradients are computed: gradients of the outputs of
    all matmuls of its layers. Their inputs are among the activations."""
    tokens, total = setting.rows * shape.seq_len, 0.0
    for found in shape.classes:
        outputs = (gemm.share * gemm.num_out for gemm in found.matmuls if not gemm.frozen)
        total += found.count * tokens * shape.matmul_bytes * math.fsum(outputs)
    return total
