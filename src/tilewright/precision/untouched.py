"""A pass through a model that leaves nothing behind: gradients, buffers, generators and what modules note on the side.

For passes that are looked at and not trained on (`monitor`), and for those that are taken back (`control`).
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.precision.fp8_linear import Fp8Linear
from tilewright.precision.own_weights import counters
from tilewright.precision.tile_linear import TileLinear


class Notes:
    """What the modules of a model hold besides parameters, as it was: buffers, and tensors noted as attributes.

    Linear layers with 8-bit weights are left out: a pass changes nothing there but the counts of what was executed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._attributes: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        for module in model.modules():
            if isinstance(module, TileLinear | Fp8Linear):
                continue
            self._buffers += [(b, b.clone()) for b in module.buffers(recurse=False) if b is not None]
            held = {name: value for name, value in vars(module).items() if value is None or isinstance(value, Tensor)}
            self._attributes.append((module, held))

    @torch.no_grad()
    def restore(self) -> None:
        """Put it back."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for module, held in self._attributes:
            for name, value in held.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside, gradients start empty; afterwards model, gradients and generators are what they were."""
    notes = Notes(model)
    grads = [(param, param.grad) for param in model.parameters()]
    layers = [layer.counts for layer in model.modules() if hasattr(layer, "counts")]
    counts = [(count, count.clone()) for count in (*layers, *counters(model))]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad
        for count, value in counts:
            count.copy_(value)
        notes.restore()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
