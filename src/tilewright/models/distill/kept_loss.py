"""The loss of a student that learns from tokens of a teacher that were kept (`kept_tokens`), with its gradient.

Legend: C positions of a chunk  K tokens that are kept  G = K + 1 groups: these, and all others  V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.models.base.output_head import IGNORED_LABEL
from tilewright.models.distill.divergences import Teaching
from tilewright.models.distill.kept_tokens import keeping


def kept_loss(
    logits_CV: Tensor,
    labels_C: Tensor,
    ids_CK: Tensor,
    theirs_CG: Tensor,
    how: Teaching,
) -> tuple[Tensor, Tensor]:
    """Loss on kept tokens of a teacher, of some rows: (1 - weight) cross-entropy + weight T^2 divergence, summed over
    targets.

    The gradient is made with the loss, from one exponential of the logits (two at another temperature than 1).

    Args:
        logits_CV: of the student, FP32.
        labels_C: int64, -100 where there is no target.
        ids_CK: the teacher's tokens.
        theirs_CG: the teacher's logarithms at the temperature.
        how: see `loss`.

    Returns:
        The sum, differentiable, and without a gradient cross-entropy and T^2 divergence of each row [C, 2].
    """
    return _KeptLoss.apply(logits_CV, labels_C, ids_CK, theirs_CG, how)


class _KeptLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: Tensor,
        labels_C: Tensor,
        ids_CK: Tensor,
        theirs_CG: Tensor,
        how: Teaching,
    ) -> tuple[Tensor, Tensor]:
        temperature, weight, divergence = how
        targets_C1 = (labels_C != IGNORED_LABEL)[:, None]
        places_C1 = labels_C.clamp_min(0)[:, None]
        total_C1 = logits_CV.logsumexp(-1, keepdim=True)
        entropy_C1 = (total_C1 - logits_CV.gather(-1, places_C1)).masked_fill(~targets_C1, 0.0)
        scaled_CV = logits_CV if temperature == 1 else logits_CV / temperature
        norm_C1 = total_C1 if temperature == 1 else scaled_CV.logsumexp(-1, keepdim=True)
        top_CK = scaled_CV.gather(-1, ids_CK) - norm_C1
        # Softmax with the teacher's tokens at zero: the sum is the others' share, free of cancellation.
        soft_CV = (scaled_CV - norm_C1).exp_().scatter_(-1, ids_CK, 0.0)
        rest_C1 = soft_CV.sum(-1, keepdim=True).clamp_min(torch.finfo(soft_CV.dtype).tiny)
        ours_CG = torch.cat((top_CK, rest_C1.log()), -1)
        with torch.enable_grad():
            ours_CG = ours_CG.detach().requires_grad_()
            each_C1 = keeping(divergence).divergence(theirs_CG, ours_CG).masked_fill(~targets_C1, 0.0)
            (slope_CG,) = torch.autograd.grad(each_C1.sum(), ours_CG)
        each_C2 = torch.cat((entropy_C1, each_C1.detach() * temperature**2), -1)
        ctx.mark_non_differentiable(each_C2)
        if ctx.needs_input_grad[0]:
            # d log q_g / d z_j = [j in g] q_j / q_g - q_j, times T^2 / T
            scale, all_C1 = weight * temperature, slope_CG.sum(-1, keepdim=True)
            own_CK = scale * (slope_CG[:, :-1] - all_C1 * top_CK.exp())
            factor_C1 = scale * (slope_CG[:, -1:] / rest_C1 - all_C1)
            share_C1 = (1 - weight) * targets_C1.to(soft_CV.dtype)
            if temperature == 1:  # the softmax of the cross-entropy is the same one
                own_CK, factor_C1 = own_CK + share_C1 * top_CK.exp(), factor_C1 + share_C1
            grad_CV = soft_CV.mul_(factor_C1).scatter_(-1, ids_CK, own_CK)
            if temperature != 1:
                grad_CV.addcmul_((logits_CV - total_C1).exp_(), share_C1)
            ctx.save_for_backward(grad_CV.scatter_add_(-1, places_C1, -share_C1))
        sums_2 = each_C2.sum(0)
        return (1 - weight) * sums_2[0] + weight * sums_2[1], each_C2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (grad_CV,) = ctx.saved_tensors
        return grad_CV * grads[0], None, None, None, None
