"""Using a model whose layer groups are stored off the device, otherwise than by a step: one layer group is there at a
time.

    with Visit(sliced) as visit:  # checkpoints: any tensor, with its bytes
        tensor = visit.tensor("model.layers.3.mlp.up_proj.weight")
    with passing(sliced):  # forward passes: evaluation, samples
        model.loss(batch)

Tensors asked for layer group by layer group (`SummonedParams.sorted`) are fetched once.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.models.base.eval_mode import eager
from tilewright.models.layerwise.view import LayerGroup, LayerGroups, LayerwiseModel


class SummonedParams:
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


@contextmanager
def passing(model: nn.Module, view: LayerwiseModel, layer_groups: LayerGroups, home: ParamOffloader) -> Iterator[None]:
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
