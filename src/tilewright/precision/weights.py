"""Weights quantised once an optimizer step, instead of in every pass.

A copy is safe only where someone says that the weights have changed: torch's fused AdamW writes them without moving
their version counter. Here the optimizer's own step hook says it, and the model's after a state_dict was loaded; who
writes weights otherwise calls `refresh`. Costs one byte a parameter. Used by `training`, or from a plain loop.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tilewright.core.errors import ConfigError
from tilewright.precision.tile_linear import TileLinear


class QuantizedWeights:
    """Keeps the codes of all `TileLinear` weights of a model up to date.

    Args:
        model: converted before.
        optimizer: its steps refresh the codes.
        without: modules whose weights are elsewhere now: they have no codes until `keep`.

    Raises:
        ConfigError: weights are sharded (FSDP2): the codes of a whole weight would undo the sharding.

    Example:
        >>> from tilewright.precision.convert import convert
        >>> model = nn.Sequential(nn.Linear(128, 128))
        >>> report = convert(model, "fp8_tile")
        >>> weights = QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model[0].weight_codes.dtype, list(model.state_dict())
        (torch.uint8, ['0.weight', '0.bias'])
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, without: Iterable[nn.Module] = ()
    ) -> None:
        self._model = model
        self._without = set(without)
        sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
        if sharded:
            raise ConfigError(
                "Codes of sharded weights cannot be kept between steps.",
                got=f"{len(sharded)} sharded parameters, the first is {sharded[0]}",
                need="whole weights on each rank",
                try_="train without QuantizedWeights: each pass then quantises what it gathers",
            )
        self._handles = [
            optimizer.register_step_post_hook(lambda *_: self.refresh()),
            model.register_load_state_dict_post_hook(lambda *_: self.refresh()),
        ]
        self.refresh()

    def layers(self, among: Iterable[nn.Module] | None = None) -> list[TileLinear]:
        """The layers whose codes are kept, of these modules or of all. They may change when the model's policy does."""
        modules = self._model.modules() if among is None else among
        return [module for module in modules if isinstance(module, TileLinear) and module not in self._without]

    @torch.no_grad()
    def refresh(self, among: Iterable[nn.Module] | None = None) -> None:
        """Quantise every weight as it is now, or those of some modules."""
        for layer in self.layers(among):
            old, tiled = layer.stored_weight(), layer.quantized_weight()
            if old is None:
                layer.store_weight(tiled)
            else:
                old.codes.copy_(tiled.codes)  # the same tensors, so compiled code stays valid
                old.scale_inv.copy_(tiled.scale_inv)

    def leave(self, modules: Iterable[nn.Module]) -> None:
        """These modules' weights go elsewhere: forget their codes, each pass makes them again."""
        for layer in self.layers(modules):
            layer.store_weight(None)
        self._without.update(modules)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """These modules' weights are here again: make their codes."""
        self._without.difference_update(modules)
        self.refresh(modules)

    def close(self) -> None:
        """Forget the codes: layers quantise in each pass again."""
        for handle in self._handles:
            handle.remove()
        for layer in self.layers():
            layer.store_weight(None)
