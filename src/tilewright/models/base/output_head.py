"""The output head and its loss, in whatever format the head was converted to.

`kernels.linear_cross_entropy` never holds all logits, so it takes the head's weight and not its forward; this is the
one place that carries the head's formats over.

Legend: N tokens  D model width  V vocabulary.
"""

import torch
from torch import Tensor, nn

from tilewright.ops.base.labels import IGNORED as IGNORED_LABEL
from tilewright.ops.base.labels import TokenLosses, check_labels, summed_and_each
from tilewright.ops.base.weight_gradient_queue import queue_now
from tilewright.ops.kernels import Kernels


def head_loss(kernels: Kernels, head: nn.Linear, x_ND: Tensor, labels_N: Tensor) -> TokenLosses:
    """Compute the loss of an output head: cross-entropy of softmax(head(x)), summed over labels other than -100.

    Of a head whose rows are cut over ranks (`parallel.inside.tensor`) each takes its own.

    The head, which has no bias, computes in its `compute_dtype` where `precision.convert` gave it one, else in x's.

    Returns:
        (loss sum; number of targets; loss of each [N]), see `ops.base.labels`.

    Raises:
        LabelError: a label is no class; see `ops.base.labels`.
    """
    part = getattr(head, "part", None)
    if part is not None:
        return part.loss(kernels, x_ND, labels_N)
    return kernels.linear_cross_entropy(*head_operands(head, x_ND), labels_N, queue_now(head))


def head_operands(head: nn.Linear, x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """The input of an output head in its format and its weight, both as its forward would multiply them."""
    dtype: torch.dtype = getattr(head, "compute_dtype", x_ND.dtype)
    operands = getattr(head, "operands", None)  # of a converted head, which may round them
    x_ND, weight_VD = (x_ND, head.weight) if operands is None else operands(x_ND)
    return x_ND.to(dtype), weight_VD


def whole_operands(head: nn.Linear, x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """An output head's `head_operands` with the rows of all ranks, where a head's are cut over them."""
    part = getattr(head, "part", None)
    return head_operands(head, x_ND) if part is None else part.whole_operands(x_ND)


def row_losses(kernels: Kernels, head: nn.Linear, x_BSD: Tensor, labels_BS: Tensor) -> list[Tensor]:
    """Loss of an output head by row: `head_loss` of each row alone."""
    return [head_loss(kernels, head, x_SD, labels_S)[0] for x_SD, labels_S in zip(x_BSD, labels_BS, strict=True)]


def logits_loss(logits: Tensor, labels: Tensor) -> TokenLosses:
    """Loss of an output head's logits [..., V] and labels [...], softmax in FP32; the loss of each [...]. Rows without
    a target are left out: the others alone are copied to FP32, and logits that overflow there leave no trace."""
    check_labels(labels.reshape(-1), logits.shape[:-1].numel(), logits.shape[-1])
    wanted = labels != IGNORED_LABEL
    logits_NV, labels_N = logits[wanted], labels[wanted]
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    loss_sum, each_N = summed_and_each(wide, labels_N)
    return loss_sum, wanted.sum(), each_N.new_zeros(labels.shape).masked_scatter_(wanted, each_N)
