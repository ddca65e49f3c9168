"""A loss of the output head summed over chunks of rows, with its gradients made at once.

What is kept until backward are the gradients of the head's input and weight, not logits: these are made once, of a few
rows that stay in the processor's caches, and freed. Backward multiplies the gradients by what comes from above.

In FP16 they would underflow: loss scaling multiplies the loss behind this. There gradients are made in backward, and
each of several chunks is made again for them.

Legend: N rows  C rows of a chunk  D width of the input  V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilewright.ops.backends.native import wide

CACHED_BYTES = 8 * 2**20
"""FP32 logits of a chunk, about what stays in the caches of a CPU's core: with 4,096 rows of 8,192 words 256 rows take
0.36 s on one core, 2,048 rows 0.65 s, 64 rows 0.56 s (docs/log.md, 2026-11-28)."""
OfChunk = Callable[..., tuple[Tensor, Tensor]]
"""Takes x [C, D], the weight [V, D] and entries of the same rows; returns the sum, and values of each row [C, ...]
without a gradient."""


def rows_at_once(num_words: int, width: int, chunk_bytes: int, *, on_cpu: bool) -> int:
    """Rows of a chunk: as many as `chunk_bytes` of FP32 logits, on a CPU not more than stay in its caches. At least as
    many as the input has columns, if they fit: the weight's gradient is read and written once per chunk.

    Args:
        num_words: V.
        width: D.
        chunk_bytes: of logits alive at once, at most, but one row.
        on_cpu: where the loss is computed.

    Example:
        >>> rows_at_once(8192, 320, 2**26, on_cpu=True), rows_at_once(128000, 4096, 2**26, on_cpu=True)
        (320, 131)
    """
    most = max(1, chunk_bytes // (4 * num_words))
    return min(most, max(width, CACHED_BYTES // (4 * num_words))) if on_cpu else most


def summed_in_chunks(
    of_chunk: OfChunk, x_ND: Tensor, weight_VD: Tensor, of_rows: Sequence[Tensor], rows: int
) -> tuple[Tensor, Tensor]:
    """The sum of a loss over chunks of so many rows, differentiable in x and weight, and the values of each row.

    Args:
        of_chunk: see `OfChunk`.
        x_ND: the head's input.
        weight_VD: of the head; it computes in x's dtype.
        of_rows: [N, ...] each, handed over by chunks.
        rows: of a chunk.
    """
    if x_ND.dtype != torch.float16:
        return _InChunks.apply(of_chunk, x_ND, weight_VD, tuple(of_rows), rows)
    if len(x_ND) <= rows:
        return of_chunk(x_ND, weight_VD, *of_rows)
    parts = [
        checkpoint(of_chunk, x_CD, weight_VD, *entries, use_reentrant=False)
        for x_CD, *entries in zip(x_ND.split(rows), *(each.split(rows) for each in of_rows), strict=True)
    ]
    sums, each = zip(*parts, strict=True)
    return torch.stack(sums).sum(), torch.cat(each)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, of_chunk: OfChunk, x_ND: Tensor, weight_VD: Tensor, of_rows: tuple[Tensor, ...], rows: int
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[1:3]
        # Once, not in each chunk; where the machine widens 16-bit operands, so that no gradient is rounded.
        is_wide = wide.widens(x_ND.device.type, x_ND.dtype)
        leaf_VD = weight_VD.detach() if is_wide else weight_VD.detach().to(x_ND.dtype)
        leaf_VD = leaf_VD.detach().requires_grad_(needs[1])
        total, each, of_x = x_ND.new_zeros((), dtype=torch.float32), [], []
        of_weight: Tensor | None = None
        for x_CD, *entries in zip(x_ND.split(rows), *(each.split(rows) for each in of_rows), strict=True):
            x_CD = x_CD.detach().requires_grad_(needs[0])
            with torch.enable_grad():
                loss, each_C = of_chunk(x_CD, leaf_VD, *entries)
            total = total + loss.detach()
            each.append(each_C)
            wanted = [tensor for tensor in (x_CD, leaf_VD) if tensor.requires_grad]
            found = iter(torch.autograd.grad(loss, wanted) if wanted else ())
            if needs[0]:
                of_x.append(next(found))
            if needs[1]:
                part_VD = next(found)  # summed in FP32: a sum in 16 bits would round with each chunk
                of_weight = part_VD.float() if of_weight is None else of_weight.add_(part_VD)
        of_weight = None if of_weight is None else of_weight.to(weight_VD.dtype)
        ctx.needs = needs
        ctx.save_for_backward(*([torch.cat(of_x)] if needs[0] else ()), *(() if of_weight is None else (of_weight,)))
        each_N = torch.cat(each)
        ctx.mark_non_differentiable(each_N)
        return total, each_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found = iter(ctx.saved_tensors)
        of_x, of_weight = (next(found) * grads[0] if needed else None for needed in ctx.needs)
        return None, of_x, of_weight, None, None
