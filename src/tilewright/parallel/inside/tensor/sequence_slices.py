"""The residual stream of a cut decoder in slices: each rank has some positions of all rows (sequence parallelism).

Between attention and MLP ranks would compute the same: norms, sums, routers, each on all tokens. With slices each
computes, and keeps for backward, its share of them. A layer gathers what it reads, and what its ranks would have added
up they add up in slices, which is as many bytes in all.

    slices = SequenceSlices(ranks)
    x_BsD = slices.enter(x_BSD); ...layers...; x_BSD = slices.leave(x_BsD, length)

Slices are as long as each other: where the length does not come out even, rows of zeros stand behind the last token.
They stay zeros through every layer, and nothing that they go through gets a gradient from them. Parameters that all
ranks have, and that read slices (norms of layers, routers), have a part of their gradient on each rank: `sum_of_slices`
adds these up, once per step.

Legend: B rows  S positions  s of a slice  R ranks  D model width  N tokens.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.formats.tiled import Parts, TiledTensor, WithCopies
from tilewright.ops.base.tensor_parts import local
from tilewright.parallel.inside.tensor.collectives import TensorRanks, moved

_PARTIAL = "partial_over"
"""Attribute of a module: ranks, and the names of its parameters that each has a part of the gradient of."""


class SequenceSlices:
    """Cuts the residual stream into slices (sequence parallelism), and puts it together.

    Args:
        ranks: each has a slice.
    """

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks
        self.length = 0
        """Positions of the batch that a layer runs on: set by its attention, which is told their angles."""

    def positions(self, length: int) -> int:
        """Positions of a slice under sequence parallelism, of S positions in all: the same on all ranks."""
        return -(-length // self.ranks.size)

    def enter(self, x_BSD: Tensor) -> Tensor:
        """This rank's slice (sequence parallelism) of a stream that all have, as they all have its gradient."""
        return moved(x_BSD, self._own, functools.partial(self._whole, length=x_BSD.shape[1]))

    def leave(self, x_BsD: Tensor, length: int) -> Tensor:
        """Gather the whole residual stream from the sequence slices of all ranks, where all ranks also have its
        gradient."""
        return moved(x_BsD, functools.partial(self._whole, length=length), self._own)

    def read(self, x_BsD: Tensor, length: int) -> Tensor:
        """Gather the whole residual stream from sequence slices for layers of which each rank has a part, and so a part
        of the gradient."""
        return moved(x_BsD, functools.partial(self._whole, length=length), self._summed)

    def written(self, x_BSD: Tensor) -> Tensor:
        """This rank's slice (sequence parallelism) of the sum of the stream over ranks."""
        return moved(x_BSD, self._summed, functools.partial(self._whole, length=x_BSD.shape[1]))

    def read_tokens(self, x: Tensor) -> Tensor:
        """Slices [..., D] of all ranks behind each other [N, D] under sequence parallelism, for what takes each token
        alone."""
        return moved(x, self._every_token, functools.partial(self._summed_tokens, shape=x.shape))

    def written_tokens(self, x_ND: Tensor, shape: torch.Size) -> Tensor:
        """Slices of the sum over ranks of what was made of these, in slices of this shape but for the width."""
        shape = torch.Size((*shape[:-1], x_ND.shape[-1]))
        return moved(x_ND, functools.partial(self._summed_tokens, shape=shape), self._every_token)

    def read_codes(self, x: WithCopies, length: int, readers: int, *, whole_gradient: bool) -> WithCopies:
        """Gather the residual stream of all ranks as codes alone, from slices that are whole tiles (`tiles_of`). One
        byte per element is sent forward, and one backward, where the weights' gradients read the other copy.

        Args:
            x: of this rank's slice.
            length: S.
            readers: layers that read it.
            whole_gradient: all ranks have the whole gradient, see `leave`.
        """
        rows, _, width = x.value.shape
        whole = functools.partial(self._codes, rows=rows, length=length)
        back = self._own if whole_gradient else self._summed
        value = moved(x.value, lambda v: _no_numbers(v, (rows, length, width)), back)
        return WithCopies(value, whole_rows(x.row, whole), x.column, Arrival(whole, readers))

    def read_token_codes(self, x: WithCopies, readers: int) -> WithCopies:
        """Slices of all ranks as codes alone, for what takes each token alone, see `read_tokens`."""
        whole, shape = self._every_token, x.value.shape
        tokens = shape[:-1].numel() * self.ranks.size
        back = functools.partial(self._summed_tokens, shape=shape)
        value = moved(x.value, lambda v: _no_numbers(v, (tokens, shape[-1])), back)
        return WithCopies(value, whole_rows(x.row, whole), x.column, Arrival(whole, readers))

    def documents_of(self, segments_BS: Tensor | None, rows: int, device: torch.device) -> Tensor | None:
        """This rank's slice (sequence parallelism) of the documents' numbers, below 0 where there is no token; None
        where each is one.

        Args:
            segments_BS: of the batch; None: tokens everywhere.
            rows: B.
            device: of the stream.
        """
        if segments_BS is None and self.length % self.ranks.size == 0:
            return None
        if segments_BS is None:
            segments_BS = torch.zeros(rows, self.length, dtype=torch.int64, device=device)
        return self._own(segments_BS + 1) - 1

    def token_numbers(self, rows: int, device: torch.device) -> Tensor:
        """The numbers of this rank's tokens among those of the batch; the first token's number where the rank has none.

        Args:
            rows: B.
            device: of the stream.
        """
        return self._own(torch.arange(rows * self.length, device=device).view(rows, -1)).flatten()

    def total(self, x: Tensor) -> Tensor:
        """The sum of slices' numbers over the ranks of sequence parallelism, without a gradient."""
        return self.ranks.total(x)

    # ---- linear maps, each with its adjoint beside it ----

    def _own(self, x: Tensor) -> Tensor:
        """This rank's slice of a sequence: [B, S, ...] -> [B, s, ...]"""
        each = self.positions(x.shape[1])
        part = x[:, self.ranks.rank * each : (self.ranks.rank + 1) * each]
        missing = each - part.shape[1]
        return F.pad(part, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else part.contiguous()

    def _whole(self, x_BsD: Tensor, length: int) -> Tensor:
        """The whole sequence from slices: [B, s, D] of each rank -> [B, S, D]"""
        x_RBsD = self.ranks.stacked(x_BsD)
        return x_RBsD.transpose(0, 1).flatten(1, 2)[:, :length].contiguous()

    def _summed(self, x_BSD: Tensor) -> Tensor:
        """The slice of a sum over ranks: [B, S, D] -> [B, s, D]"""
        ranks, (rows, length, width) = self.ranks.size, x_BSD.shape
        each = self.positions(length)
        padded = F.pad(x_BSD, (0, 0, 0, each * ranks - length))
        return self.ranks.scattered(padded.view(rows, ranks, each, width).transpose(0, 1))

    def _codes(self, codes_nK: Tensor, rows: int, length: int) -> Tensor:
        """Gather the codes of all ranks' tokens, or tiles of tokens, in the order of one process."""
        each = len(codes_nK) // rows
        tokens = length // self.ranks.size // each  # that share one
        return self._whole(codes_nK.view(rows, each, -1), length // tokens).flatten(0, 1)

    def _every_token(self, x: Tensor) -> Tensor:
        return self.ranks.stacked(x).flatten(0, -2)

    def _summed_tokens(self, x_ND: Tensor, shape: torch.Size) -> Tensor:
        return self.ranks.scattered(x_ND.view(self.ranks.size, *shape))


class Arrival:
    """Column-wise codes of all ranks' tokens, from those of each. The layers that read one input have them of one
    exchange.

    Args:
        whole: codes or scales [n, K] of each rank to those of all.
        readers: how many layers.
    """

    def __init__(self, whole: Callable[[Tensor], Tensor], readers: int) -> None:
        self._whole, self._readers, self._left = whole, readers, 0
        self._found: Parts = (None, None, None)

    def __call__(self, parts: Parts) -> Parts:
        """Arrived codes and scales of sequence slices: [K, n], [K, n / 128] -> [K, N], [K, N / 128]."""
        if not self._left:
            codes_Kn, scale_Kg, _ = parts
            assert codes_Kn is not None, "backward has kept them"
            assert scale_Kg is not None, "in tiles"
            self._found = self._whole(codes_Kn.T).T, self._whole(scale_Kg.T).T, None
            self._left = self._readers
        self._left -= 1
        found = self._found
        if not self._left:
            self._found = (None, None, None)
        return found


def whole_rows(row: TiledTensor, whole: Callable[[Tensor], Tensor]) -> TiledTensor:
    """Codes and scales of each token under sequence parallelism, put together."""
    return replace(row, qdata=whole(row.qdata), scale_inv=whole(row.scale_inv))


def _no_numbers(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Make NaN without memory in the shape of values that no layer reads; their gradients pass through it."""
    return like.new_full((), float("nan")).expand(shape)


def sliced_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that all ranks have, and that read slices (sequence parallelism); none where the stream is whole."""
    if getattr(model, "slices", None) is None:
        return
    blocks: Any = model.get_submodule("model.layers")
    for block in blocks:
        parts = [block.input_layernorm] if block.has_attention else []
        parts += [block.post_attention_layernorm] if block.has_mlp else []
        parts += [block.mlp.gate] if block.is_moe else []
        for part in parts:
            yield from part.parameters()


def mark_partial(module: nn.Module, ranks: TensorRanks, names: Sequence[str]) -> None:
    """Mark parameters of a module that all ranks hold, and of whose gradients each rank computes a part from its
    sequence slice.

    Args:
        module: of the parameters.
        ranks: that have them.
        names: of them; may be empty.
    """
    if names:
        module.__dict__[_PARTIAL] = ranks, tuple(names)


def partial_parameters(model: nn.Module) -> tuple[TensorRanks | None, list[nn.Parameter]]:
    """Partial parameters under sequence slices, that all ranks have, and each a part of the gradient of: those that
    read slices, or the heads that are here (`cut_hf_model`), and of adapters of cut matrices. With the ranks; None
    where there are none."""
    slices = getattr(model, "slices", None)
    ranks: TensorRanks | None = None if slices is None else slices.ranks
    params = list(sliced_parameters(model))
    for module in model.modules():
        if _PARTIAL in module.__dict__:
            ranks, names = module.__dict__[_PARTIAL]
            params += [module.get_parameter(name) for name in names if name in module._parameters]  # else merged
    return ranks, params


@torch.no_grad()
def sum_of_slices(model: nn.Module) -> None:
    """Sum the gradients of `partial_parameters` over the ranks of sequence slices. Once per step, when they are summed
    over rows."""
    ranks, params = partial_parameters(model)
    grads = [local(param.grad) for param in params if param.grad is not None]
    if ranks is None:
        return
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        same = [grad for grad in grads if grad.dtype == dtype]
        summed = ranks.total(torch.cat([grad.flatten() for grad in same]))
        for grad, part in zip(same, summed.split([grad.numel() for grad in same]), strict=True):
            grad.copy_(part.view_as(grad))
