"""AdamW by torch's fused kernel, and by torch.compile of the reference where states or weights are BF16."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tilewright.ops.inductor import compile_options
from tilewright.ops.ref.adam import AdamHyper, Update, update, update_all


def fused(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    numbers: Sequence[int],
    hyper: AdamHyper,
) -> None:
    """torch's fused AdamW: parameters, gradients and moments of one wide dtype. Nothing is rounded, so `numbers` is
    not read."""
    steps = [torch.tensor(float(hyper.step - 1), device=param.device) for param in params]  # it counts up itself
    adamw(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
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
