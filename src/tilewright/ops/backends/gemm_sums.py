"""FP32 sums of products of 16-bit operands on CUDA: the GEMM itself adds, in place, and nothing is rounded between.

One operator, compiled or not: torch's compiler (2.13) has no lowering for `addmm` with `out_dtype` (pytorch #163880).

Legend: C rows of a chunk  V rows of the sum  D columns.
"""

import torch
from torch import Tensor


@torch.library.custom_op("tilewright::add_product_", mutates_args=("sum_VD",))
def add_product_(sum_VD: Tensor, part_CV: Tensor, x_CD: Tensor) -> None:
    """Add to sums of a GEMM on CUDA: sum += part^T x.

    Args:
        sum_VD: in FP32, or in the operands' dtype.
        part_CV, x_CD: of one dtype.
    """
    if sum_VD.dtype == x_CD.dtype:
        sum_VD.addmm_(part_CV.T, x_CD)
    else:
        torch.addmm(sum_VD, part_CV.T, x_CD, out_dtype=sum_VD.dtype, out=sum_VD)


@add_product_.register_fake
def _(sum_VD: Tensor, part_CV: Tensor, x_CD: Tensor) -> None: ...
