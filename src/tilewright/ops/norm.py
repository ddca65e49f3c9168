"""rms_norm: y = x / sqrt(mean(x^2) + eps) * weight over the last dim, statistics in FP32, returns x's dtype."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.backends.ref import math as ref
from tilewright.ops.base.dispatch import Candidate, Op, always


def native(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm by torch: `F.rms_norm` on an FP32 (FP64) view of the input; one fused loop under torch.compile."""
    high = torch.promote_types(x.dtype, torch.float32)
    if _is_next_token(x):
        return _one_row(x.to(high), weight_D.to(high), eps).to(x.dtype)
    return F.rms_norm(x.to(high), (x.shape[-1],), weight_D.to(high), eps).to(x.dtype)


def _is_next_token(x: Tensor) -> bool:
    alone = x.numel() == x.shape[-1] and x.device.type == "cpu"
    return alone and not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def _one_row(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Norm of one row, for the next token of a text: `F.rms_norm` is ten operations on a CPU, which take as long as a
    matmul there."""
    flat_D = x.reshape(-1)
    return (x * (torch.dot(flat_D, flat_D).item() / len(flat_D) + eps) ** -0.5).mul_(weight_D)


RMS_NORM = Op(
    "rms_norm",
    (Candidate("native", native, always), Candidate("ref", ref.rms_norm, always)),
    in_transforms=ref.rms_norm,
)
