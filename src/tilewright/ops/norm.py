"""rms_norm: y = x / sqrt(mean(x^2) + eps) * weight over the last dim, statistics in FP32, returns x's dtype."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.backends.ref import math as ref
from tilewright.ops.base.dispatch import Candidate, Op, always


def native(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` on an FP32 (FP64) view of the input; one fused loop under torch.compile."""
    high = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(high), (x.shape[-1],), weight_D.to(high), eps).to(x.dtype)


RMS_NORM = Op("rms_norm", (Candidate("native", native, always), Candidate("ref", ref.rms_norm, always)))
