"""The `MemoryPlan` of a layer-major run, applied to its layer groups; and from one to the next between two steps.

    homes = by_group(memory_plan, layer_groups)  # checked against the layer groups
    policy = PlanApplier(run, memory_plan, weights)
    policy.now                                              # read off what is really where
    policy.apply(memory_plan)

Which activations are kept and where bytes are stored changes no number, so it may change at any time. Into how many
parts MLPs and attention are cut rounds differently, so that stays as the run began. Called by
`training.executor.layer_major` and `training.executor.executor_kinds`.
"""

from collections.abc import Mapping
from dataclasses import replace

from tilewright.core.config.recipe import Tier
from tilewright.core.errors import ConfigError
from tilewright.core.memory_plan import LayerMemory, MemoryPlan
from tilewright.memory.layer_major.passes import LayerMajor
from tilewright.models.layerwise.layer_view import LayerGroup, LayerGroups
from tilewright.precision.float8.weight_cache import QuantizedWeights

Homes = tuple[Tier, Tier]
"""Of parameters and of states."""


def by_group(memory_plan: MemoryPlan, layer_groups: LayerGroups) -> dict[str, LayerMemory]:
    """The memory plan to apply to each layer group, by its name. Not the shared one, which is always on the device.

    Raises:
        ConfigError: the memory plan is of another number of layers, cuts a layer group, or asks for what is not
        offered.
    """
    num_layers = sum(len(part.layers) for part in layer_groups.groups)
    if len(memory_plan.layers) != num_layers:
        raise other_layers(len(memory_plan.layers), num_layers)
    found = {layer_groups.prologue.name: memory_plan.embedding, layer_groups.epilogue.name: memory_plan.head}
    for part in layer_groups.groups:
        layers = [memory_plan.layers[index] for index in part.layers]
        selected = next((one.activations for one in layers if one.activations not in ("keep", "recompute")), None)
        if selected is not None:
            raise ConfigError(
                "Layer-major executor does not keep selected activations",
                got=f'activations "{selected}" for {part.name}',
                need='"keep" or "recompute"',
                try_='another plan, or memory.executor = "standard"',
                where="memory.executor",
            )
        if len({_of_slice(layer) for layer in layers}) > 1:
            raise ConfigError(
                "Layers of one layer group are asked to be in several places",
                got=f"different parameters, states, inputs or activations within {part.name}",
                need="the same for all layers of a layer group",
                try_="memory.layers_per_group = 1",
                where="memory.layers_per_group",
            )
        found[part.name] = layers[0]
    return found


def other_layers(asked: int, there: int) -> ConfigError:
    """The error of applying a memory plan that is of another model."""
    return ConfigError(
        "Memory plan belongs to another model",
        got=f"{asked} layers",
        need=f"{there}, as many as can be placed in this one",
        try_="a plan made for this model",
    )


def input_tiers(memory_plan: MemoryPlan, layer_groups: LayerGroups) -> dict[int, Tier]:
    """The memory tier in which the input of each layer group waits, by place. The last entry is the output that waits
    for the loss."""
    found: dict[int, Tier] = {
        place: memory_plan.layers[part.layers[0]].inputs for place, part in enumerate(layer_groups.groups)
    }
    found[len(layer_groups.groups)] = memory_plan.head.inputs
    return found


def check_same_numbers(new: MemoryPlan, old: MemoryPlan, *, exact: bool) -> None:
    """Check the same numbers before a plan is applied: refuse a change in mid-run that would not leave them as they
    are.

    Args:
        new: of as many layers as `old`.
        old: what runs.
        exact: layers that are recomputed are so from exact inputs, not from 8-bit ones.

    Raises:
        ConfigError: it would not.
    """
    for index, (to, of) in enumerate(zip(new.layers, old.layers, strict=True)):
        if (to.mlp_chunks, to.attention_block) != (of.mlp_chunks, of.attention_block):
            raise ConfigError(
                "MLP chunks and attention blocks cannot change during a run",
                got=f"layer {index}: mlp_chunks {to.mlp_chunks}, attention_block {to.attention_block}",
                need=f"{of.mlp_chunks} and {of.attention_block}, as the run began: others round differently",
                try_="a plan that changes activations and homes alone",
            )
        if not exact and "recompute" in {to.activations, of.activations} and to.activations != of.activations:
            raise ConfigError(
                "Recomputed layers cannot change during a run with FP8 layer inputs",
                got=f'layer {index}: "{of.activations}" to "{to.activations}"',
                need="the same: gradients of a layer that is recomputed from a rounded input are others",
                try_='train.checkpoint_inputs = "exact"',
                where="train.checkpoint_inputs",
            )


def _of_slice(layer: LayerMemory) -> LayerMemory:
    """A plan to apply without what each layer of a layer group has for itself."""
    return replace(layer, mlp_chunks=1, attention_block=0)


class PlanApplier:
    """Reads and changes the memory plan of a layer-major run.

    Args:
        run: its layer groups are stored as `memory_plan` says, and so are the inputs.
        memory_plan: the first one; None: all on the device, everything recomputed.
        weights: 8-bit codes of weights stored on the device, which follow them.

    Raises:
        ConfigError: see `by_group`.
    """

    def __init__(
        self, run: LayerMajor, memory_plan: MemoryPlan | None = None, weights: QuantizedWeights | None = None
    ) -> None:
        num_layers = sum(len(part.layers) for part in run.layer_groups.groups)
        self._run, self._weights = run, weights
        self._asked = memory_plan or MemoryPlan.uniform(num_layers, activations="recompute")
        run.keeps = self._keeps(self._asked)

    @property
    def now(self) -> MemoryPlan:
        """The applied plan of now, read from where tensors are."""
        layer_groups, run = self._run.layer_groups, self._run
        layers: list[LayerMemory] = []
        for place, part in enumerate(layer_groups.groups):
            kind = "keep" if place in run.keeps else "recompute"
            told = self._told(part, place)
            layers += [replace(self._asked.layers[index], activations=kind, **told) for index in part.layers]
        embedding = replace(self._asked.embedding, **self._told(layer_groups.prologue))
        head = replace(self._asked.head, **self._told(layer_groups.epilogue, len(layer_groups.groups)))
        return MemoryPlan(layers=tuple(layers), embedding=embedding, head=head)

    def apply(self, memory_plan: MemoryPlan) -> None:
        """Execute this memory plan from the next step on: all of it or, if that fails, nothing.

        Raises:
            ConfigError: it cannot be done by this executor, or not while the run continues.
            FitError: a tier has not so much room.
            HardwareError: the disk fails.
            RuntimeError: the device has not so much memory.
        """
        before = self.now
        wanted = by_group(memory_plan, self._run.layer_groups)
        check_same_numbers(memory_plan, before, exact=self._run.inputs.kind == "exact")
        homes: dict[str, Homes] = {name: (layer.parameters, layer.states) for name, layer in wanted.items()}
        self._run.inputs.place(input_tiers(memory_plan, self._run.layer_groups))
        try:
            self._move(homes)
        except BaseException:
            self._run.inputs.place(input_tiers(before, self._run.layer_groups))
            raise
        self._run.keeps, self._asked = self._keeps(memory_plan), memory_plan

    def _keeps(self, memory_plan: MemoryPlan) -> frozenset[int]:
        wanted = by_group(memory_plan, self._run.layer_groups)
        groups = enumerate(self._run.layer_groups.groups)
        return frozenset(place for place, part in groups if wanted[part.name].activations == "keep")

    def _told(self, part: LayerGroup, place: int | None = None) -> Mapping[str, Tier]:
        parameters, states = self._run.offloader.homes(part)
        told: dict[str, Tier] = {"parameters": parameters, "states": states}
        if place is not None:
            told["inputs"] = self._run.inputs.tier_of(place)
        return told

    def _move(self, homes: Mapping[str, Homes]) -> None:
        """Move layer groups to apply a plan, those that make room on the device first; move them back where one of them
        cannot."""
        todo = []
        for part in self._run.layer_groups:
            old = self._run.offloader.homes(part)
            if part is not self._run.layer_groups.shared and homes[part.name] != old:
                todo.append((part, old, homes[part.name]))
        todo.sort(key=lambda move: move[2].count("device") - move[1].count("device"))
        moved: list[tuple[LayerGroup, Homes]] = []
        try:
            for part, old, new in todo:
                moved.append((part, old))
                self._move_one(part, new)
        except BaseException:
            for part, old in reversed(moved):
                self._move_one(part, old)
            raise

    def _move_one(self, part: LayerGroup, homes: Homes) -> None:
        parameters, states = homes
        if self._weights is not None and parameters != "device":
            self._weights.leave(part.modules)
        self._run.offloader.move(part, parameters=parameters, states=states)
        if self._weights is not None and parameters == "device":
            self._weights.keep(part.modules)
