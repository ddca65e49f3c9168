"""What a layer-major step keeps of the slices that it changes, to go back where its gradient turns out bad.

`InMemory` keeps copies on the host. The protocol is what the executor needs. Called by `layer_major_step`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tilewright.memory.layer_major import Residence
from tilewright.models.layered import Slice


class Undo(Protocol):
    """Makes a half-applied step whole again."""

    def begin(self) -> None:
        """A step begins."""
        ...

    def keep(self, part: Slice, tensors: Sequence[Tensor]) -> None:
        """Keep the values of a slice's tensors, which are about to change for the first time in this step."""
        ...

    def rollback(self, residence: Residence) -> None:
        """Write everything back that was kept."""
        ...

    def commit(self) -> None:
        """The step is over; what was kept is of no use any more."""
        ...


class InMemory:
    """Copies on the host: as many bytes as the parameters and their states. The buffers are used again."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Slice, Sequence[Tensor]]] = {}
        self._copies: dict[str, list[Tensor]] = {}

    def begin(self) -> None:
        self._kept.clear()

    @torch.no_grad()
    def keep(self, part: Slice, tensors: Sequence[Tensor]) -> None:
        copies = self._copies.get(part.name)
        if copies is None or [c.shape for c in copies] != [t.shape for t in tensors]:
            copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
            self._copies[part.name] = copies
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        self._kept[part.name] = part, tensors

    @torch.no_grad()
    def rollback(self, residence: Residence) -> None:
        for name, (part, tensors) in self._kept.items():
            residence.fetch(part)
            for copy, tensor in zip(self._copies[name], tensors, strict=True):
                tensor.copy_(copy)
            residence.release(part, changed=True)

    def commit(self) -> None:
        self._kept.clear()
