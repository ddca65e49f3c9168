"""torch's linear layer, fast for a few rows (`row_linear` of `ops.linear`)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.ops.base.transforms import is_followed
from tilewright.ops.linear import MOST_ROWS


class RowLinear(nn.Linear):
    """torch's layer. An input of a few rows goes to `row_linear`, where its values are read and nothing else: without
    autograd, autocast, compilation and whatever else follows torch's operations. The weight is read at each call, so
    what was written to it counts; it may have another dtype or device by then, which torch's own computes."""

    row_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Set by `attach`."""
    row_dtype: torch.dtype
    """That it was chosen for."""

    def forward(self, input: Tensor) -> Tensor:
        weight_MK, bias_M = self.weight, self.bias
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not _are_rows(input, weight_MK, bias_M, self.row_dtype)
        ):
            return F.linear(input, weight_MK, bias_M)
        return self.row_linear(input, weight_MK, bias_M)


def _are_rows(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None, dtype: torch.dtype) -> bool:
    """True for a few rows that a row-wise linear layer takes: of tensors whose memory, on the host, has their
    values."""
    return (
        type(x) is Tensor
        and type(weight_MK) is nn.Parameter
        and not is_followed()
        and 0 < x.numel() <= MOST_ROWS * weight_MK.shape[1]
        and x.shape[-1:] == weight_MK.shape[1:]
        and x.dtype == weight_MK.dtype == dtype
        and (bias_M is None or bias_M.dtype == dtype)
        and x.is_cpu
        and weight_MK.is_cpu
        and not x.is_neg()
        and weight_MK.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )
