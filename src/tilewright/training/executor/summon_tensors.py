"""Tensors of a model and its optimizer otherwise than by a step, wherever an executor stores them. Where some are off
the device, one layer group at a time is there.

    access = TensorAccess(view, layer_groups, home)  # `TensorAccess()`: all is on the device
    with access.summon(model, optimizer) as summoned:  # checkpoints: any tensor, with its bytes
        tensor = summoned.tensor("model.layers.3.mlp.up_proj.weight", other)
    with access.forward_passes(model):  # evaluation, samples
        model.loss(batch)

Tensors asked for layer group by layer group (`Summoned.sorted`) are fetched once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.models.base.eval_mode import eager
from tilewright.models.layerwise.layer_view import LayerGroup, LayerGroups, LayerwiseModel
from tilewright.ops.base.code_modules import named_constants
from tilewright.training.executor.step_transaction import all_finite

Live = Callable[[str, Tensor], Tensor]
"""A tensor with its bytes, from its name and one that has its shape and dtype; until the next is asked for."""


class Summoned:
    """Tensors of a model and its optimizer with their bytes, live one layer group at a time.

    Args:
        model: whose parameters are visited.
        optimizer: whose states are, None for none.
        layer groups: of the model; none where all of it is on the device.
        home: where they are.
        changes: what is live may be written to, and is written back.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        layer_groups: LayerGroups | None = None,
        home: ParamOffloader | None = None,
        *,
        changes: bool = False,
    ) -> None:
        self._home, self._changes, self._optimizer = home, changes, optimizer
        self._open: LayerGroup | None = None
        self._found: dict[str, tuple[int, LayerGroup, nn.Parameter, str]] = {}
        names = {param: name for name, param in model.named_parameters()}
        for number, part in enumerate(layer_groups or ()):
            for param in part.params:
                self._found[f"model.{names[param]}"] = number, part, param, ""
                for key in optimizer.state.get(param, {}) if optimizer is not None else ():
                    self._found[f"optimizer.{names[param]}.{key}"] = number, part, param, key

    def __enter__(self) -> "Summoned":
        return self

    def __exit__(self, *_: object) -> None:
        self.open(None)
        if self._changes and self._home is not None:
            self._home.flush()

    def open(self, part: LayerGroup | None) -> None:
        """Summon a layer group: its parameters become live, and those of no other group are."""
        if part is self._open or self._home is None:
            return
        if self._open is not None:
            self._home.release(self._open, changed=self._changes)
        if part is not None:
            self._home.fetch(part, states=self._optimizer is not None)
        self._open = part

    @property
    def live(self) -> Live | None:
        """See `tensor` of summoned ones; None where each tensor has its bytes all the time."""
        return None if self._home is None else self.tensor

    def sorted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sort tensors in the order in which they are best summoned: those of one layer together."""
        first = (-1,)
        return dict(sorted(tensors.items(), key=lambda item: self._found.get(item[0], first)[0]))

    def tensor(self, name: str, other: Tensor) -> Tensor:
        """Summon the tensor of this name with its bytes, until one of another layer group is asked for; `other` where
        the name is of nothing that has a home."""
        if name not in self._found:
            return other
        _, part, param, key = self._found[name]
        self.open(part)
        return self._optimizer.state[param][key] if key and self._optimizer is not None else param.detach()


class TensorAccess:
    """The tensors of an executor's model.

    Args:
        view: the model layer by layer; None where all of it is on the device.
        layer_groups: of the model.
        home: where they are.
    """

    def __init__(
        self,
        view: LayerwiseModel | None = None,
        layer_groups: LayerGroups | None = None,
        home: ParamOffloader | None = None,
    ) -> None:
        self._view, self._groups, self._home = view, layer_groups, home

    def summon(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, changes: bool = False
    ) -> Summoned:
        """Summon any tensor, with its bytes.

        Args:
            model: whose parameters are wanted.
            optimizer: whose states are, too; None for none.
            changes: what is summoned is written to.
        """
        if self._home is None or not self._home.is_offloaded:
            return Summoned(model, optimizer)
        return Summoned(model, optimizer, self._groups, self._home, changes=changes)

    def is_finite(self, model: nn.Module) -> bool:
        """True where every parameter and buffer is finite, summoned one by one."""
        with self.summon(model) as summoned:
            if summoned.live is None or self._groups is None:
                finite = all_finite(model.named_parameters())
            else:
                finite = all(self._group_is_finite(summoned, part) for part in self._groups)
        return finite and all_finite(named_constants(model).items())

    def _group_is_finite(self, summoned: Summoned, part: LayerGroup) -> bool:
        summoned.open(part)
        return all_finite((part.name, param) for param in part.params)

    @contextmanager
    def forward_passes(self, model: nn.Module) -> Iterator[None]:
        """Run forward passes of the model inside this context, for evaluation and samples: each layer group is summoned
        when a pass comes to it.

        Nothing is compiled inside then: the layers' hooks are not part of what was.
        """
        visit = self.summon(model)
        if visit.live is None or self._view is None or self._groups is None:
            yield
            return

        def enter(part: LayerGroup) -> Any:
            return lambda *_: visit.open(part)

        groups, blocks, handles = self._groups, self._view.blocks, []
        for part in (groups.prologue, groups.epilogue):
            handles += [module.register_forward_pre_hook(enter(part)) for module in part.modules]
        for part, following in zip(groups.groups, (*groups.groups[1:], groups.epilogue), strict=True):
            handles.append(blocks[part.layers[0]].register_forward_pre_hook(enter(part)))
            # The head may be read without being called, so what follows the last layer comes at its end.
            handles.append(blocks[part.layers[-1]].register_forward_hook(enter(following)))
        try:
            with visit, eager():
                yield
        finally:
            for handle in handles:
                handle.remove()
