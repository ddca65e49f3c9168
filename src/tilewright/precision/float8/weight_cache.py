"""Weights quantised once an optimizer step, instead of in every pass.

The FP8 data know which values they were made from and are made again when these change, whatever wrote them (see
`weight_store`). The optimizer's step hook only chooses the time: the update, not the next forward. Costs 1 byte per
parameter and reads each weight once per pass. On a GPU nothing is kept: a check would cost what it saves.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tilewright.core.errors import ConfigError
from tilewright.precision.float8.linear import Float8Linear


class QuantizedWeights:
    """Keeps FP8 data of all `Float8Linear` weights of a model.

    Args:
        model: converted before.
        optimizer: its steps quantise what they changed at once.
        without: modules whose weights are elsewhere now: nothing is kept of them until `keep`.

    Raises:
        ConfigError: weights are sharded (FSDP2): the codes of a whole weight would undo the sharding.

    Example:
        >>> from tilewright.precision.convert import convert
        >>> model = nn.Sequential(nn.Linear(128, 128))
        >>> model = convert(model, "fp8_tile")
        >>> weights = QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model[0].quantized_weight().qdata.dtype, list(model.state_dict())
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
                "FP8 copies of sharded weights cannot be kept between steps",
                got=f"{len(sharded)} sharded parameters, the first is {sharded[0]}",
                need="whole weights on each rank",
                try_="train without QuantizedWeights: each pass then quantises what it gathers",
            )
        self._optimizer = optimizer
        self._handle: RemovableHandle | None = None
        self.refresh()

    def layers(self, among: Iterable[nn.Module] | None = None) -> list[Float8Linear]:
        """Layers in the cache of quantised weights, whose codes are kept, of these modules or of all. They change when
        the model's policy does: call `refresh` then."""
        modules = self._model.modules() if among is None else among
        return [module for module in modules if isinstance(module, Float8Linear) and module not in self._without]

    @torch.no_grad()
    def refresh(self, among: Iterable[nn.Module] | None = None) -> None:
        """Quantise the weights of the cache that have changed, all of them or those of some modules."""
        layers = self.layers(among)
        if layers and self._handle is None:  # without a layer in FP8 there is nothing to do after a step
            self._handle = self._optimizer.register_step_post_hook(lambda *_: self.refresh())
        for layer in layers:
            if not layer.keeps_weight:
                layer.keep_weight(True)
            if layer.weight_store is not None:
                layer.quantized_weight()

    def leave(self, modules: Iterable[nn.Module]) -> None:
        """Remove the weights of these modules from the cache: each pass quantises them."""
        for layer in self.layers(modules):
            layer.keep_weight(False)
        self._without.update(modules)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Keep these modules' weights in the cache of quantised ones again."""
        self._without.difference_update(modules)
        self.refresh(modules)

    def close(self) -> None:
        """Close the cache of quantised weights: layers quantise in each pass again."""
        if self._handle is not None:
            self._handle.remove()
        for layer in self.layers():
            layer.keep_weight(False)
