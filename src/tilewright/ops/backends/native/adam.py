"""AdamW by torch's fused kernel, and by torch.compile of the reference where states or weights are BF16."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tilewright.ops.backends.ref.adam import AdamHyper, Update, update, update_all
from tilewright.ops.base.compile import compile_options


def fused(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    numbers: Sequence[int],
    hyper: AdamHyper,
) -> None:
    """torch's fused AdamW: parameters, gradients and moments of one wide dtype. Nothing is rounded, so `numbers` is
    not read.

    The kernel goes through memory as it lies: tensors whose elements are in different orders, or apart, take copies.
    """
    given = list(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True))
    rows = [_alike(row) for row in given]
    counted = float(hyper.step - 1)  # the kernel counts up itself
    counts = {
        device: torch.full((len(rows),), counted, device=device).unbind() for device in {p.device for p in params}
    }
    steps = [counts[param.device][place] for place, param in enumerate(params)]
    adamw(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2] for row in rows],
        [row[3] for row in rows],
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=False,
    )
    for tensors, row in zip(given, rows, strict=True):
        if row is not tensors:
            for place in (0, 2, 3):
                tensors[place].copy_(row[place])


Row = tuple[Tensor, Tensor, Tensor, Tensor]
"""Parameter, gradient and moments."""


def _alike(row: Row) -> Row:
    """The same numbers, in memory without gaps and in one order."""
    if all(tensor.is_contiguous() for tensor in row):
        return row
    if len({tensor.stride() for tensor in row}) == 1 and _is_dense(row[0]):
        return row
    param, grad, exp_avg, exp_avg_sq = (tensor.contiguous() for tensor in row)
    return param, grad, exp_avg, exp_avg_sq


def _is_dense(tensor: Tensor) -> bool:
    """Whether elements that do not overlap fill a stretch of memory."""
    return 1 + sum(d * (size - 1) for d, size in zip(tensor.stride(), tensor.shape, strict=True)) == tensor.numel()


@functools.cache
def _compiled_update() -> Update:
    return torch.compile(update, dynamic=True, options=compile_options())


def compiled(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    numbers: Sequence[int],
    hyper: AdamHyper,
) -> None:
    """The reference's update, fused into one loop over each tensor."""
    update_all(_compiled_update(), params, grads, exp_avgs, exp_avg_sqs, numbers, hyper)
