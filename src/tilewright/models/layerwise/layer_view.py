"""A model as a row of layers between a prologue and an epilogue, which can be run one at a time.

    prologue(batch) -> x, context      layer(0 .. L-1, x, context) -> x      epilogue(x, context, batch) -> loss

The context is tensors, and any stage of a pipeline makes it from the batch: `context(batch)` reads no parameter.
`Decoder` is such a row itself; `hf_view` finds one in a Hugging Face model; `SingleBlock` is what is left of a model
that cannot be cut: no layers, all of it epilogue. `find_layer_groups` says which parameters belong together when layers
are run and updated by groups."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tilewright.models.base.protocols import LayerContext, LossOutput, TrainableModel


class LayerwiseModel(Protocol):
    """A model that can be run layer by layer. Each call may be repeated, and gives the same again from the same random
    state.

    The loss of a batch is that of the model's own `loss`.
    """

    blocks: Sequence[nn.Module]

    def context(self, batch: Mapping[str, Tensor]) -> LayerContext:
        """The tensors that all layers read, from the batch alone: bitwise those of `prologue`. Draws no random
        numbers."""
        ...

    def prologue(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, LayerContext]:
        """Compute the first layer's input, and the context that all layers read."""
        ...

    def layer(self, index: int, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        """Run one layer: its output, and the number that it counts (the load of its experts) or None."""
        ...

    def epilogue(self, x: Tensor, context: LayerContext, batch: Mapping[str, Tensor]) -> LossOutput:
        """Compute the loss from the last layer's output. `aux` is left empty."""
        ...

    def aux_metrics(self, counted: Sequence[Tensor]) -> dict[str, Tensor]:
        """Layerwise view's metrics: `LossOutput.aux` of one micro-batch, from what its layers counted. Once a forward
        pass."""
        ...

    def outer_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Layerwise view's outer parameters, that the prologue and the epilogue read; those in both are in both
        lists."""
        ...


class SingleBlock:
    """A model that cannot be cut, as a `LayerwiseModel` without layers."""

    def __init__(self, model: TrainableModel) -> None:
        self.model = model
        self.blocks: Sequence[nn.Module] = ()

    def context(self, batch: Mapping[str, Tensor]) -> LayerContext:
        return {}

    def prologue(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, LayerContext]:
        return torch.zeros(()), {}

    def layer(self, index: int, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("a model that is kept whole has no layers")

    def epilogue(self, x: Tensor, context: LayerContext, batch: Mapping[str, Tensor]) -> LossOutput:
        return self.model.loss(batch)

    def aux_metrics(self, counted: Sequence[Tensor]) -> dict[str, Tensor]:
        return {}

    def outer_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return [], list(self.model.parameters())


@dataclass(frozen=True)
class LayerGroup:
    """Parameters that are needed, and updated, together."""

    name: str
    """prologue, layers.2-3, epilogue, or shared: read in more than one of the others, so updated last."""
    layers: range
    params: tuple[nn.Parameter, ...]
    modules: tuple[nn.Module, ...]
    """The modules that hold the parameters, without their children where those are listed themselves."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """The trained parameters of a group of layers."""
        return [param for param in self.params if param.requires_grad]


@dataclass(frozen=True)
class LayerGroups:
    """All layer groups of a model. Each parameter is in exactly one."""

    prologue: LayerGroup
    groups: tuple[LayerGroup, ...]
    epilogue: LayerGroup
    shared: LayerGroup

    def __iter__(self):
        yield from (self.prologue, *self.groups, self.epilogue, self.shared)


def find_layer_groups(model: nn.Module, view: LayerwiseModel, group: int = 1) -> LayerGroups:
    """Divide a model into layer groups, `group` layers in each, and the parts around them.

    A parameter that nothing reads (a head that this task has no use for) goes with the prologue.
    """
    count = len(view.blocks)
    ranges = [range(first, min(first + group, count)) for first in range(0, count, group)]
    before, after = view.outer_parameters()
    owned = [_unique(p for i in indices for p in view.blocks[i].parameters()) for indices in ranges]
    times = Counter(p for params in (_unique(before), _unique(after), *owned) for p in params)
    before = _unique([*before, *(p for p in model.parameters() if p not in times)])
    shared = [param for param, number in times.items() if number > 1]
    holders = {p: module for module in model.modules() for p in module.parameters(recurse=False)}

    def cut(name: str, layers: range, params: Iterable[nn.Parameter]) -> LayerGroup:
        own = tuple(params)
        return LayerGroup(name, layers, own, tuple(_unique(holders[p] for p in own)))

    alone = [[p for p in params if times[p] < 2] for params in (before, after, *owned)]
    groups = tuple(cut(_layers_name(r), r, params) for r, params in zip(ranges, alone[2:], strict=True))
    none = range(0)
    return LayerGroups(
        cut("prologue", none, alone[0]), groups, cut("epilogue", none, alone[1]), cut("shared", none, shared)
    )


def _layers_name(layers: range) -> str:
    return f"layers.{layers[0]}" if len(layers) == 1 else f"layers.{layers[0]}-{layers[-1]}"


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
