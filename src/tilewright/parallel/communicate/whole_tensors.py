"""Whole tensors of a model on the first rank, one at a time: no rank holds the model. Ranks may hold shards of tensors,
and tensors that other ranks do not have.

whole = WholeTensors(world.everyone.handle, model.state_dict())
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

from tilewright.parallel.agree import from_first, gather


class WholeTensors:
    """Whole tensors of a model by name, of which each rank holds a part, all, or nothing.

    Args:
        group: whose ranks all make one of these, over gloo; None for one process, whose tensors are whole.
        tensors: of this rank. Those that are no DTensors are whole.
    """

    def __init__(self, group: dist.ProcessGroup | None, tensors: Mapping[str, Tensor]) -> None:
        self._group = group
        self._tensors = tensors
        self._holders: dict[str, int] = {}
        """The first rank that has a tensor of this name."""
        self.elsewhere: dict[str, Tensor] = {}
        """What other ranks have and this one has not, by name: shapes and dtypes, without memory."""
        own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        for rank, held in enumerate(gather(group, own)):
            for name, (shape, dtype) in held.items():
                self._holders.setdefault(name, rank)
                if name not in tensors and name not in self.elsewhere:
                    self.elsewhere[name] = torch.empty(shape, dtype=dtype, device="meta")

    def tensor(self, name: str) -> Tensor:
        """A whole tensor with all its values, for the first rank; others serve. One that it has not is on the host.

        Every rank that has a shard of it holds it whole for the moment.
        """
        if name not in self._tensors or isinstance(self._tensors[name], DTensor):
            from_first(self._group, name)
            return self._given(name)
        return self._gathered(name)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Inside, the first rank may ask for whole tensors. The others take part, and come out when the first rank
        does."""
        if self._group is None:
            yield
        elif dist.get_rank(self._group) == 0:
            try:
                yield
            finally:
                from_first(self._group, None)
        else:
            while (name := from_first(self._group, None)) is not None:
                self._given(name)
            yield

    def _given(self, name: str) -> Tensor:
        """The tensor as this rank has it whole; on the first rank, where it has none, as its holder sends it."""
        value = self._gathered(name) if name in self._tensors else torch.empty(0)
        rank, holder = dist.get_rank(self._group), self._holders[name]
        if holder and rank == holder:
            dist.send(_bytes(value.cpu().contiguous()), group=self._group, group_dst=0)
        elif holder and rank == 0:
            value = torch.empty_like(self.elsewhere[name], device="cpu")
            dist.recv(_bytes(value), group=self._group, group_src=holder)
        return value

    @torch.no_grad()
    def _gathered(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
