"""A plan: what was decided for a model and its layers, and what that is expected to take.

`planner.planner` makes plans, `planner.plan_file` writes and reads them, `planner.describe` puts them into words.
`memory_plan` is what the executors get.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tilewright.core.config.recipe import Recipe, Tier
from tilewright.core.hardware import Machine
from tilewright.core.memory_plan import KIND_OF, OFFLOADS, LayerMemory, MemoryPlan
from tilewright.core.units import ranges
from tilewright.planner.cost.choices import GlobalConfig, Links, state_bytes
from tilewright.planner.cost.phases import FRAGMENTS, FixedBytes, rollback_bytes
from tilewright.planner.cost.solve import Cost
from tilewright.planner.cost.traffic import RankTraffic
from tilewright.planner.model.shape import ModelShape
from tilewright.planner.model.weights import Weights

State = Literal["fits", "does not fit", "not known"]
_SPARE = 1 + 1e-6
"""What the solver's tolerance may use up of a budget (`solve`), and more."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a run may use, and what links its places. Without a disk speed the disk is not used."""

    device: float
    host: float
    links: Links
    disk: float = 0.0

    def without_disk(self) -> "Budget":
        """The same where the disk is no place."""
        return replace(self, disk=0.0, links=replace(self.links, disk=None))


@dataclass(frozen=True)
class PlanRow:
    """Layers of one class that are treated alike, or an end of the model (no indices)."""

    name: str
    indices: tuple[int, ...]
    choice: LayerMemory
    cost: Cost

    @property
    def count(self) -> int:
        """Layers of the row."""
        return max(1, len(self.indices))


@dataclass(frozen=True)
class Plan:
    """What was decided, and what it is expected to take."""

    recipe: Recipe
    shape: ModelShape
    machine: Machine
    budget: Budget
    setting: GlobalConfig
    rows: tuple[PlanRow, ...]
    phases: Mapping[str, Mapping[str, float]]
    """Device bytes by owner at each phase."""
    host: Mapping[str, float]
    """Host bytes by owner."""
    seconds: Mapping[str, float]
    """Of a step, by part."""
    narrowed: Mapping[str, str] = field(default_factory=dict)
    """Formats that the plan had to change, by setting."""
    notes: tuple[str, ...] = ()

    @property
    def peak_phase(self) -> str:
        """The phase with the most bytes on the device."""
        return max(self.phases, key=self.phase_bytes)

    @property
    def peak_bytes(self) -> float:
        """Most bytes on the device at any phase."""
        return self.phase_bytes(self.peak_phase)

    def phase_bytes(self, phase: str) -> float:
        """Device bytes of all owners at a phase."""
        return sum(self.phases[phase].values())

    @property
    def host_bytes(self) -> float:
        """Bytes on the host."""
        return sum(self.host.values())

    @property
    def state(self) -> State:
        """Whether the run is within its budgets. What is known of a run may be too much already where the rest is not
        known."""
        over_host = bool(self.host) and self.host_bytes > self.budget.host
        if self.peak_bytes > self.budget.device or over_host:
            return "does not fit"
        return "not known" if self.shape.unknown else "fits"

    @property
    def keeps_margin(self) -> bool:
        """Whether the run is known to fit, and leaves `plan.margin` of the device free."""
        return self.state == "fits" and self.peak_bytes <= self._left * self.budget.device

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.recipe.train.global_batch_size * self.shape.seq_len

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.tokens_per_step / self.step_s

    @property
    def traffic(self) -> RankTraffic:
        """Bytes that a rank exchanges with others in a step."""
        return RankTraffic.of(self.shape, self.setting.shards, self.setting.num_micro)

    @property
    def disk_bytes(self) -> float:
        """Bytes in the disk tier, the rollback buffer among them where there is such a tier."""
        used = sum(row.count * row.cost.disk for row in self.rows)
        if not any("disk" in (row.choice.parameters, row.choice.states) for row in self.rows):
            return used
        return used + rollback_bytes(
            FixedBytes.of(self.shape, self.setting, self.recipe, self.machine), self.setting, self.recipe
        )

    @property
    def least_device(self) -> float:
        """Device memory of a budget in which this plan is accepted: what it takes, `plan.margin`, and on a GPU what its
        allocator cannot hand out."""
        lost = 0.0 if self.machine.device == "cpu" else FRAGMENTS
        taken = self.peak_bytes - lost * self.budget.device
        return _SPARE * taken / (self._left * (1 - lost))

    @property
    def least_host(self) -> float:
        """The same of the host's memory."""
        return _SPARE * self.host_bytes / self._left

    @property
    def least_disk(self) -> float:
        """The same of the disk's."""
        return _SPARE * self.disk_bytes / self._left

    @property
    def _left(self) -> float:
        return 1 - self.recipe.plan.margin

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the executors are reported."""
        layers = [self.row_of(layer).choice for layer in range(self.shape.num_layers)]
        ends = {
            row.name: LayerMemory(parameters=row.choice.parameters, states=row.choice.states)
            for row in self.rows
            if not row.indices
        }
        return MemoryPlan(layers=tuple(layers), **ends)

    def row_of(self, layer: int) -> PlanRow:
        """The row of a layer by its number."""
        return next(row for row in self.rows if layer in row.indices)

    def settings(self) -> dict[str, object]:
        """The recipe's settings that say the same, as far as they can; what differs by layer is in `rows`."""
        setting = self.setting
        standard = setting.can.activation_checkpoint
        found: dict[str, object] = {
            "memory.executor": setting.executor,
            "train.micro_batch_size": setting.micro_batch_size,
            "memory.loss_chunk_bytes": setting.loss_chunk_bytes,
            "optim.moments": setting.moments,
            "optim.master_weights": setting.master,
        }
        if not self.recipe.checkpoint.async_save:
            found["checkpoint.async_save"] = False
        if not self.recipe.precision.eval_fp32:
            found["precision.eval_fp32"] = False
        kinds = {row.choice.activations for row in self.rows if row.indices}
        modes = {kind: mode for mode, kind in KIND_OF.items()}
        found["train.activation_checkpoint"] = modes[kinds.pop()] if standard and len(kinds) == 1 else "none"
        if setting.can.offload:
            found |= self._tiers()
        return found

    def _tiers(self) -> dict[str, object]:
        """Settings of what is the same for all layers of a layer-major run."""
        choices = [row.choice for row in self.rows if row.indices]
        found: dict[str, object] = {}
        for kind, name in _TIERS.items():
            values = {getattr(choice, kind) for choice in choices}
            if len(values) == 1:
                value = values.pop()
                found[name] = OFFLOADS.get(value, value)
        return found


_TIERS = {
    "parameters": "memory.offload_params",
    "states": "memory.offload_optimizer",
    "inputs": "memory.offload_activations",
    "mlp_chunks": "memory.mlp_chunks",
    "attention_block": "memory.attention_block",
}
"""Settings by the name of the field of `LayerMemory`."""
OF_A_LAYER = frozenset(("train.activation_checkpoint", *_TIERS.values()))
"""Settings of what may differ from layer to layer."""


def fingerprint(shape: ModelShape) -> str:
    """What a plan was made for: the layers' structure and number, the ends, the length of rows."""
    facts = [(c.name, c.indices, c.num_parameters) for c in shape.classes]
    ends = (shape.embedding.count, shape.head.count, shape.vocab_size, shape.dim, shape.seq_len)
    return hashlib.sha256(repr((facts, ends)).encode()).hexdigest()[:16]


def bytes_of(shape: ModelShape, setting: GlobalConfig, row: PlanRow) -> list[tuple[str, float]]:
    """(place, bytes) of a row's parameters and states, of sharded ones this rank's part."""
    weights = weights_of(shape, row).part(setting.shards.count)
    parameters, states = places(setting, row)
    return [(parameters, row.count * weights.stored), (states, row.count * state_bytes(weights, setting))]


def on_host(shape: ModelShape, setting: GlobalConfig, row: PlanRow) -> list[tuple[str, float]]:
    """(owner, bytes) of what of a row is in host memory, its activations left out; 0 where it is elsewhere."""
    sizes = zip(("parameters", "optimizer"), bytes_of(shape, setting, row), strict=True)
    found = [(owner, size if place == "host" else 0.0) for owner, (place, size) in sizes]
    if setting.shards.offload:
        found.append(("gradients", 4.0 * row.count * weights_of(shape, row).part(setting.shards.count).trained))
    return found


@dataclass(frozen=True)
class RankRow:
    """Ranks that hold equally much of a run, and the bytes that they hold all the time."""

    ranks: tuple[int, ...]
    parameters: float
    gradients: float
    """Of a whole step, in FP32."""
    optimizer: float


def rank_rows(plan: Plan) -> list[RankRow]:
    """What each rank holds. Parts of parameters are as long as the first rank's, filled up where rows do not come out
    even; the last ranks have fewer gradients and states."""
    shards, setting = plan.setting.shards, plan.setting
    found: dict[tuple[float, float], list[int]] = {}
    for rank in range(shards.ranks):
        part = plan.shape.weights.part(shards.count, rank % shards.count)
        found.setdefault((4.0 * part.trained, state_bytes(part, setting)), []).append(rank)
    parameters = plan.shape.weights.part(shards.count).stored
    return [RankRow(tuple(ranks), parameters, *sizes) for sizes, ranks in found.items()]


def places(setting: GlobalConfig, row: PlanRow) -> tuple[Tier, Tier]:
    """Where parameters and states of a row are between the passes."""
    return ("host", "host") if setting.shards.offload else (row.choice.parameters, row.choice.states)


def weights_of(shape: ModelShape, row: PlanRow) -> Weights:
    """Of one layer of a row, or of an end of the model."""
    if row.indices:
        return shape.class_of(row.indices[0]).weights
    return shape.embedding if row.name == "embedding" else shape.head


def describe(row: PlanRow) -> str:
    """The layers of a row as people write them."""
    return f"{row.name} {ranges(row.indices)}" if row.indices else row.name
