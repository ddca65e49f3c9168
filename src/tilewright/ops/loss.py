"""linear_cross_entropy: the language-model head and its loss as one operation.

loss = sum over labels != -100 of -log softmax(x_ND @ weight_VD.T)[label], softmax in FP32.
Returns (loss sum as FP32 scalar, number of targets as int64 scalar).
"""

from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.dispatch import Candidate, Op, always
from tilewright.ops.ref import math as ref


def native(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in x's dtype, loss in FP32."""
    logits_NV = F.linear(x_ND, weight_VD.to(x_ND.dtype))
    loss = F.cross_entropy(logits_NV.float(), labels_N, ignore_index=-100, reduction="sum")
    return loss, (labels_N != -100).sum()


LINEAR_CROSS_ENTROPY = Op(
    "cross_entropy", (Candidate("native", native, always), Candidate("ref", ref.linear_cross_entropy, always))
)
