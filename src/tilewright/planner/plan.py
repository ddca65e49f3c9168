"""A plan: what was decided for a model and its layers, and what that is expected to take.

`planner.planner` makes plans, `planner.decide` chooses one, `planner.plan_file` writes and reads them. `memory_plan` is
what executors apply. `phases` are those that the solver knows; `tracked` are the same bytes as the memory tracker of a
run measures them, which is what `to_json` (plan.json of a run) has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from tilewright.core.config.recipe import ParallelSection, Recipe
from tilewright.core.hardware import Machine
from tilewright.core.memory_plan import KIND_OF, OFFLOADS, STEP_PHASES, LayerMemory, MemoryPlan
from tilewright.core.units import format_bytes, format_count, format_seconds
from tilewright.planner.cost.layer_choices import GlobalConfig, Links
from tilewright.planner.cost.operations import HEAD, Operation, by_part, total_s
from tilewright.planner.cost.owners import reserve_of, tracked
from tilewright.planner.cost.plan_rows import PlanRow, RankRow, rank_rows, recomputed
from tilewright.planner.cost.rank_traffic import RankTraffic, cut_traffic
from tilewright.planner.cost.step_phases import FRAGMENTS, FixedBytes, rollback_bytes
from tilewright.planner.model.model_shape import ModelShape
from tilewright.planner.model.roofline import binding

State = Literal["fits", "does not fit", "not known"]
_SPARE = 1 + 1e-6
"""What the solver's tolerance may use up of a budget (`solve`), and more."""
_NEAR = 0.97
"""Of what a plan may use of a budget: from here on it binds."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a run may use, and what links its places. Without a disk speed the disk is not used."""

    device: float
    host: float
    links: Links
    disk: float = 0.0

    def without_disk(self) -> "Budget":
        """The plan's budget without a disk."""
        return replace(self, disk=0.0, links=replace(self.links, disk=None))


@dataclass(frozen=True)
class Plan:
    """A decision, and the memory and time that it is expected to take."""

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
    around: tuple[Operation, ...]
    """Of a step, around the layers; those of a layer are in its row."""
    narrowed: Mapping[str, str] = field(default_factory=dict)
    """Formats that the plan had to change, by setting."""
    notes: tuple[str, ...] = ()
    decided: bool = False
    """Whether the planner chose it, layer by layer; else it is the recipe as it stands."""
    stands_because: str = ""
    """Why the planner decides nothing of this recipe, and cannot plan it again; empty where it may."""
    split: tuple[int, ...] = ()
    """Layers of each stage of a pipeline, which the run then holds; empty where they are as many in each."""
    stages: int = 1
    """Ranks of a pipeline, of which the plan is that of the one that holds most."""
    whole: ModelShape | None = None
    """The model of all of them together; None where `shape` is."""
    least_bytes: float | None = None
    """The least that a step takes with what the recipe says, where that did not fit and something else was decided."""
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """(text, numbers) of what a run tells of how this was decided."""

    @property
    def peak_phase(self) -> str:
        """The phase of the plan with the most bytes on the device."""
        return max(self.phases, key=self.phase_bytes)

    @property
    def peak_bytes(self) -> float:
        """Most bytes on the device at any phase of the plan."""
        return self.phase_bytes(self.peak_phase)

    def phase_bytes(self, phase: str) -> float:
        """Device bytes of all owners at a phase of the plan."""
        return sum(self.phases[phase].values())

    @property
    def step_bytes(self) -> float:
        """Most bytes on the device in a step of the plan; evaluation and checkpoints left out."""
        return max(self.phase_bytes(name) for name in self.phases if name.startswith(STEP_PHASES))

    @property
    def host_bytes(self) -> float:
        """Bytes on the host by the plan."""
        return sum(self.host.values())

    @property
    def state(self) -> State:
        """The state of a plan, by its run beside the budgets. The known part of a run may exceed them where the rest is
        not known."""
        over_host = bool(self.host) and self.host_bytes > self.budget.host
        if self.peak_bytes > self.budget.device or over_host:
            return "does not fit"
        return "not known" if self.shape.unknown else "fits"

    @property
    def keeps_margin(self) -> bool:
        """True if the run of this plan is known to fit, and leaves `plan.margin` of the device free."""
        return self.state == "fits" and self.peak_bytes <= self._left * self.budget.device

    @property
    def accepted(self) -> bool:
        """True if a run executes this plan: what stands as the recipe says has to leave `plan.margin`, too."""
        return self.state == "fits" and (self.decided or self.keeps_margin)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Planned seconds of a step, by part: the sums of `around` and of the rows' operations."""
        found = by_part(self.around)
        for row in self.rows:
            for name, value in by_part(row.operations).items():
                found[name] = found.get(name, 0.0) + row.count * value
        return found

    def row_s(self, row: PlanRow) -> float:
        """Planned seconds of a step for one layer of a row; of the head with the loss."""
        loss = [one for one in self.around if one.visit == HEAD] if row.name == HEAD else []
        return total_s([*row.operations, *loss])

    @property
    def rest_s(self) -> float:
        """Planned seconds of a step that are in no row: work between embedding, layers and head, and communication."""
        return total_s(one for one in self.around if one.visit != HEAD)

    @property
    def step_s(self) -> float:
        """The plan's seconds of an optimizer step."""
        return sum(self.seconds.values())

    @property
    def known_step_s(self) -> float:
        """The plan's seconds of an optimizer step; 0 where they are not known."""
        return 0.0 if self.shape.unknown else self.step_s

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step of the plan."""
        return self.recipe.train.global_batch_size * self.shape.seq_len

    @property
    def tokens_per_s(self) -> float:
        """The plan's tokens per second."""
        return self.tokens_per_step / self.step_s

    @property
    def traffic(self) -> RankTraffic:
        """Planned bytes that a rank exchanges with others in a step."""
        return self._of_weights.plus(self._of_tokens)

    @property
    def _of_weights(self) -> RankTraffic:
        return RankTraffic.of(self.shape, self.setting.shards, self.setting.num_micro)

    @property
    def _of_tokens(self) -> RankTraffic:
        micro, again = (self.setting.micro_batch_size, self.setting.num_micro), recomputed(self.rows)
        return cut_traffic(self.shape, self.recipe, *micro, again)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Planned bytes of a step that a rank sends to others, by operation; what ranks that cut matrices exchange left
        out."""
        found = self._of_weights.plus(RankTraffic(exchange=self._of_tokens.exchange))
        return {name: int(size) for name, size in found.sent(self.setting.shards).items()}

    @property
    def disk_bytes(self) -> float:
        """Planned bytes in the disk tier, the rollback buffer among them where there is such a tier."""
        used = sum(row.count * row.cost.disk for row in self.rows)
        if not any("disk" in (row.choice.parameters, row.choice.states) for row in self.rows):
            return used
        return used + rollback_bytes(
            FixedBytes.of(self.shape, self.setting, self.recipe, self.machine), self.setting, self.recipe
        )

    @property
    def least_device(self) -> float:
        """The least device budget in which this plan is accepted: its bytes, `plan.margin`, and on a GPU the bytes that
        its allocator cannot hand out."""
        lost = 0.0 if self.machine.device == "cpu" else FRAGMENTS
        taken = self.peak_bytes - lost * self.budget.device
        return _SPARE * taken / (self._left * (1 - lost))

    @property
    def least_host(self) -> float:
        """Host memory of a budget in which the plan is accepted."""
        return _SPARE * self.host_bytes / self._left

    @property
    def least_disk(self) -> float:
        """Disk space of a budget in which the plan is accepted."""
        return _SPARE * self.disk_bytes / self._left

    @property
    def _left(self) -> float:
        return 1 - self.recipe.plan.margin

    @property
    def memory_plan(self) -> MemoryPlan:
        """The plan as the memory plan that executors apply."""
        layers = [self.row_of(layer).choice for layer in range(self.shape.num_layers)]
        ends = {
            row.name: LayerMemory(parameters=row.choice.parameters, states=row.choice.states)
            for row in self.rows
            if not row.indices
        }
        return MemoryPlan(layers=tuple(layers), **ends)

    def row_of(self, layer: int) -> PlanRow:
        """The row of the plan for a layer, by its number."""
        return next(row for row in self.rows if layer in row.indices)

    @property
    def ranks(self) -> list[RankRow]:
        """The plan's rows of each rank's memory."""
        return rank_rows(self.shape, self.setting)

    def scaled(self, memory: float, time: float) -> "Plan":
        """This plan, corrected by what was measured.

        Args:
            memory: measured over planned bytes of the device.
            time: measured over planned seconds.
        """
        phases = {
            name: {owner: size * memory for owner, size in owners.items()} for name, owners in self.phases.items()
        }
        rows = (replace(row, operations=tuple(one.scaled(time) for one in row.operations)) for row in self.rows)
        return replace(self, phases=phases, rows=tuple(rows), around=tuple(one.scaled(time) for one in self.around))

    def held(self, section: ParallelSection) -> ParallelSection:
        """The plan as a run's `[parallel]`, with the layers of each stage that it counts on."""
        return section.model_copy(update={"split": self.split}) if self.split else section

    def settings(self) -> dict[str, object]:
        """The plan as the recipe's settings that say the same, as far as they can; what differs by layer is in
        `rows`."""
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
        """The plan's settings of what is the same for all layers of a layer-major run."""
        choices = [row.choice for row in self.rows if row.indices]
        found: dict[str, object] = {}
        for kind, name in _TIERS.items():
            values = {getattr(choice, kind) for choice in choices}
            if len(values) == 1:
                value = values.pop()
                found[name] = OFFLOADS.get(value, value)
        return found

    # ---- in words ----

    @property
    def speed(self) -> str:
        """The plan's time of a step and tokens/s, in words."""
        return f"{format_seconds(self.step_s)} a step, {format_count(self.tokens_per_s)} tokens/s"

    @property
    def verdict(self) -> str:
        """The plan's verdict in a sentence: fit, speed, and the scarce memory."""
        peak, unknown = format_bytes(self.peak_bytes), self.shape.unknown
        budget = format_bytes(self.budget.device)
        each = self.setting.shards.of_each
        if self.state == "not known":
            return f"It is not known whether the run fits: {unknown}. It takes more than {peak} of {budget}{each}."
        if unknown:
            return (
                f"The run does not fit: it takes more than {peak} of {budget}{each}, and how much is not known "
                f"({unknown})."
            )
        host = f" and {format_bytes(self.host_bytes)} of {format_bytes(self.budget.host)} host memory"
        owners = self.phases[self.peak_phase]
        largest = max(owners, key=lambda owner: owners[owner])
        taken = f"{peak} of {budget} on the device{each} (at {self.peak_phase}, mostly {largest})"
        taken += host if self.host else ""
        if self.state == "does not fit":
            return f"The run does not fit: it takes {taken}; {self.speed}."
        narrowed = f" with {self.formats}, which changes what is learned" if self.narrowed else ""
        most = max(self.seconds, key=lambda name: self.seconds[name])
        scarce = f"{' and '.join(self.scarce) or 'no memory'} {'are' if len(self.scarce) > 1 else 'is'} scarce"
        return f"The run fits{narrowed}: {taken}; {self.speed}; {scarce}, most time goes to {most}."

    @property
    def formats(self) -> str:
        """Formats of the optimizer that the plan had to narrow; empty where it is the recipe's."""
        return ", ".join(f"{name} = {value}" for name, value in self.narrowed.items())

    @property
    def scarce(self) -> list[str]:
        """Memory that the plan uses up; empty where more would not make it faster."""
        near = _NEAR * self._left
        found = ["device memory"] if self.peak_bytes >= near * self.budget.device else []
        return [*found, "host memory"] if self.host and self.host_bytes >= near * self.budget.host else found

    # ---- as a run's memory tracker has it ----

    @cached_property
    def tracked(self) -> Mapping[str, Mapping[str, int]]:
        """The plan's bytes by owner at load, forward, backward, update, evaluate and checkpoint, `reserve_bytes` left
        out."""
        return tracked(self.phases, self.setting.can, self.reserve_bytes)

    @property
    def reserve_bytes(self) -> int:
        """The plan's bytes of the process on the device outside of its allocator."""
        return reserve_of(self.phases) if self.machine.device == "cuda" else 0

    @property
    def tracked_phase(self) -> str:
        """The phase of a planned step with the most tracked bytes."""
        return max((name for name in self.tracked if name in STEP_PHASES), key=self.tracked_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Most tracked bytes in a planned step; 0 where that is not known."""
        return 0 if self.shape.unknown else self.tracked_bytes(self.tracked_phase)

    def tracked_bytes(self, phase: str) -> int:
        """The plan's tracked bytes of all owners at a phase."""
        return sum(self.tracked[phase].values())

    def to_json(self) -> dict[str, Any]:
        """The plan in plain types for plan.json, in the memory tracker's words; None where it is not known."""
        peak, unknown = max(self.tracked, key=self.tracked_bytes), self.shape.unknown
        # Numbers that a part without a known cost would make too small.
        known = {
            "peak_phase": peak,
            "peak_bytes": self.tracked_bytes(peak),
            "step_phase": self.tracked_phase,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_step / self.step_s if not unknown else None,
        }
        return {name: None if unknown else value for name, value in known.items()} | {
            "state": self.state,
            "fits": self.state == "fits",
            "device": self.machine.device,
            "num_parameters": self.shape.num_parameters,
            "phases": {name: dict(owners) for name, owners in self.tracked.items()},
            "other_parts": {
                "process": int(self.phases["load"]["process"]),
                "work": int(max(owners["work"] for owners in self.phases.values())),
            },
            "budget_bytes": int(self.budget.device),
            "reserve_bytes": self.reserve_bytes,
            "seconds": dict(self.seconds),
            "sent_bytes": self.sent_bytes,
            "tokens_per_step": self.tokens_per_step,
            "bound_by": list(binding(self.seconds)),
            "verdict": self.verdict,
            "notes": list(self.notes),
            "unknown": unknown,
        }


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
