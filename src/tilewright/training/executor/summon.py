"""Using a model whose layer groups are stored off the device, otherwise than by a step: one layer group is there at a
time.

    access = TieredAccess(view, layer_groups, home)
    with access.summon(model, optimizer) as summoned:  # checkpoints: any tensor, with its bytes
        tensor = summoned.tensor("model.layers.3.mlp.up_proj.weight", other)
    with access.forward_passes(model):  # evaluation, samples
        model.loss(batch)

Tensors asked for layer group by layer group (`SummonedParams.sorted`) are fetched once.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.models.base.eval_mode import eager
from tilewright.models.layerwise.view import LayerGroup, LayerGroups, LayerwiseModel
from tilewright.ops.base.codes import named_constants
from tilewright.training.executor.bad_steps import all_finite
from tilewright.training.executor.base import Live, Summoned, TensorAccess


class SummonedParams(Summoned):
    """Tensors of a model and its optimizer, live one layer group at a time.

    Args:
        model: whose parameters are visited.
        optimizer: whose states are, None for none.
        layer groups: of the model.
        home: where they are.
        changes: what is live may be written to, and is written back.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        layer_groups: LayerGroups,
        home: ParamOffloader,
        *,
        changes: bool = False,
    ) -> None:
        self._home, self._changes, self._states = home, changes, optimizer is not None
        self._open: LayerGroup | None = None
        self._found: dict[str, tuple[int, LayerGroup, nn.Parameter, str]] = {}
        self._optimizer = optimizer
        names = {param: name for name, param in model.named_parameters()}
        for number, part in enumerate(layer_groups):
            for param in part.params:
                self._found[f"model.{names[param]}"] = number, part, param, ""
                for key in optimizer.state.get(param, {}) if optimizer is not None else ():
                    self._found[f"optimizer.{names[param]}.{key}"] = number, part, param, key

    def __enter__(self) -> "SummonedParams":
        return self

    def __exit__(self, *_: object) -> None:
        self.open(None)
        if self._changes:
            self._home.flush()

    def open(self, part: LayerGroup | None) -> None:
        """Have this layer group live, and no other."""
        if part is self._open:
            return
        if self._open is not None:
            self._home.release(self._open, changed=self._changes)
        if part is not None:
            self._home.fetch(part, states=self._states)
        self._open = part

    @property
    def live(self) -> Live:
        """See `tensor`."""
        return self.tensor

    def sorted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same, those of one layer group together."""
        first = (-1,)
        return dict(sorted(tensors.items(), key=lambda item: self._found.get(item[0], first)[0]))

    def tensor(self, name: str, other: Tensor) -> Tensor:
        """The tensor of this name with its bytes, until one of another layer group is asked for; `other` where the name
        is of nothing that has a home."""
        if name not in self._found:
            return other
        _, part, param, key = self._found[name]
        self.open(part)
        return self._optimizer.state[param][key] if key and self._optimizer is not None else param.detach()


class TieredAccess(TensorAccess):
    """Of a model whose layer groups may be stored off the device.

    Args:
        view: the model layer by layer.
        layer_groups: of the model.
        home: where they are.
    """

    def __init__(self, view: LayerwiseModel, layer_groups: LayerGroups, home: ParamOffloader) -> None:
        self._view, self._groups, self._home = view, layer_groups, home

    def summon(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, changes: bool = False
    ) -> AbstractContextManager[Summoned]:
        """See `TensorAccess.summon`: one layer group is there at a time."""
        if not self._home.is_offloaded:
            return super().summon(model, optimizer, changes=changes)
        return SummonedParams(model, optimizer, self._groups, self._home, changes=changes)

    def forward_passes(self, model: nn.Module) -> AbstractContextManager[None]:
        """See `TensorAccess.forward_passes`."""
        away = self._home.is_offloaded
        return _passing(model, self._view, self._groups, self._home) if away else super().forward_passes(model)

    def is_finite(self, model: nn.Module) -> bool:
        """See `TensorAccess.is_finite`."""
        if not self._home.is_offloaded:
            return super().is_finite(model)
        with SummonedParams(model, None, self._groups, self._home) as summoned:
            for part in self._groups:
                summoned.open(part)
                if not all_finite((part.name, param) for param in part.params):
                    return False
        return all_finite(named_constants(model).items())


@contextmanager
def _passing(model: nn.Module, view: LayerwiseModel, layer_groups: LayerGroups, home: ParamOffloader) -> Iterator[None]:
    """Forward passes of the model inside find each layer group on the device when they come to it.

    Nothing is compiled inside: the layers' hooks are not part of what was.
    """
    visit = SummonedParams(model, None, layer_groups, home)

    def enter(part: LayerGroup) -> Any:
        return lambda *_: visit.open(part)

    handles = []
    for part in (layer_groups.prologue, layer_groups.epilogue):
        handles += [module.register_forward_pre_hook(enter(part)) for module in part.modules]
    for place, part in enumerate(layer_groups.groups):
        following = layer_groups.groups[place + 1] if place + 1 < len(layer_groups.groups) else layer_groups.epilogue
        handles.append(view.blocks[part.layers[0]].register_forward_pre_hook(enter(part)))
        # The head may be read without being called, so what follows the last layer comes at its end.
        handles.append(view.blocks[part.layers[-1]].register_forward_hook(enter(following)))
    try:
        with visit, eager():
            yield
    finally:
        for handle in handles:
            handle.remove()
