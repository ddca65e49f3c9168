"""Labels that a loss takes: numbers of classes, and one value for rows that have no target.

A loss with a kernel of its own checks what torch's checks: a label that is no class would be read as another one's, or
write into a neighbour's gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from tilewright.core.errors import LabelError
from tilewright.ops.base.transforms import unwrapped

TokenLosses = tuple[Tensor, Tensor, Tensor]
"""What a loss of tokens gives: their sum, FP32 scalar, differentiable; the number of targets, int64 scalar; the loss of
each, FP32, detached, 0 where there is no target. The sum is not made of the last, which costs no pass of its own."""
IGNORED = -100
SHOWN = 3
"""Labels that an error names."""


@dataclass(frozen=True)
class ClassSlice:
    """The classes whose logits are here, of a loss over more of them."""

    first: int
    own: int
    total: int
    join: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(log-sum-exp [C] over the classes here, the label's logit [C], zero where it is none of these) -> the same over
    all classes."""

    def owns(self, labels_N: Tensor) -> Tensor:
        """True for each label that a slice of classes owns: boolean [N].

        Example:
            >>> ClassSlice(2, 2, 6, max).owns(torch.tensor([1, 2, 3, 4, -100])).tolist()
            [False, True, True, False, False]
        """
        return (labels_N >= self.first) & (labels_N < self.first + self.own)


def check_labels(labels_N: Tensor, num_rows: int, num_classes: int) -> None:
    """Raise where labels are not int64 [N], each a class or `IGNORED`.

    On a GPU, and in compiled code, a label that is no class stops the device, as torch's losses do: the host does not
    wait for the answer.

    Raises:
        LabelError: which is an IndexError too, as torch's.

    Example:
        >>> check_labels(torch.tensor([0, -100, 2]), 3, 3)
        >>> check_labels(torch.tensor([0, -1, 3]), 3, 3)
        Traceback (most recent call last):
            ...
        tilewright.core.errors.LabelError: Labels that are no class
          got    2 of 3: -1 at 1, 3 at 2
          need   from 0 to 2, or -100 where there is no target
          try    -100 for padding and prompts; data encoded with the model's own vocabulary
    """
    if labels_N.shape != (num_rows,) or labels_N.dtype != torch.int64:
        raise LabelError(
            "Labels that do not fit their rows",
            got=f"shape {tuple(labels_N.shape)}, {str(labels_N.dtype).removeprefix('torch.')}",
            need=f"shape ({num_rows},), int64",
            try_="a label for each position; labels.long()",
        )
    if torch.compiler.is_compiling() or labels_N.device.type != "cpu":
        torch._assert_async(_are_labels(labels_N, num_classes).all(), "a label is no class of this loss")
    elif num_rows and not isinstance(labels_N, FakeTensor):
        labels_N = unwrapped(labels_N).flatten()  # of all samples where a vmap goes over them
        if not len(labels_N):
            return
        least, most = labels_N.aminmax()
        if int(least) >= 0 and int(most) < num_classes:
            return
        bad = (~_are_labels(labels_N, num_classes)).nonzero().flatten().tolist()
        if bad:
            shown = ", ".join(f"{int(labels_N[row])} at {row}" for row in bad[:SHOWN])
            raise LabelError(
                "Labels that are no class",
                got=f"{len(bad)} of {len(labels_N)}: {shown}{', ...' if len(bad) > SHOWN else ''}",
                need=f"from 0 to {num_classes - 1}, or {IGNORED} where there is no target",
                try_=f"{IGNORED} for padding and prompts; data encoded with the model's own vocabulary",
            )


def summed_and_each(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cross-entropy of labels: torch's sum over all rows, to the last bit, and that of each row [N], detached.

    Args:
        logits_NV: [N, V] in the dtype to compute in.
        labels_N: [N] int64, `IGNORED` where there is no target.
    """
    log_prob_NV = F.log_softmax(logits_NV, -1)
    each_N = F.nll_loss(log_prob_NV.detach(), labels_N, ignore_index=IGNORED, reduction="none")
    return F.nll_loss(log_prob_NV, labels_N, ignore_index=IGNORED, reduction="sum"), each_N


def _are_labels(labels_N: Tensor, num_classes: int) -> Tensor:
    return ((labels_N >= 0) & (labels_N < num_classes)) | (labels_N == IGNORED)
