"""Whole tensors of a sharded model on the first rank, one at a time: no rank holds the model.

whole = WholeTensors(world.data_group, model.state_dict())
with whole.serving():  # the others' part ends when the first rank's does
    if world.is_first:
        write(whole.tensor(name) for name in names)
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tilewright.parallel.agree import from_first


class WholeTensors:
    """Tensors by name, of which each rank holds a part.

    Args:
        group: whose ranks all have one of these; None for one process, whose tensors are whole.
        tensors: the same names on all ranks. Those that are no DTensors are whole already.
    """

    def __init__(self, group: dist.ProcessGroup | None, tensors: Mapping[str, Tensor]) -> None:
        self._group = group
        self._tensors = tensors

    def tensor(self, name: str) -> Tensor:
        """A tensor with all its values; for the first rank, while the others serve.

        Every rank holds it whole for the moment.
        """
        if isinstance(self._tensors[name], DTensor):
            from_first(self._group, name)
        return self._gathered(name)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Inside, the first rank may ask for tensors. The others take part, and come out when the first rank does."""
        if self._group is None:
            yield
        elif dist.get_rank(self._group) == 0:
            try:
                yield
            finally:
                from_first(self._group, None)
        else:
            while (name := from_first(self._group, None)) is not None:
                self._gathered(name)
            yield

    @torch.no_grad()
    def _gathered(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
