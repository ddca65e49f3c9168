"""x W^T + b of a few rows on CPUs by a library in C++, which reads the weight once and as it is.

Legend: N rows  M out features  K in features.
"""

import torch
from torch import Tensor

from tilewright.core.hardware import Machine
from tilewright.ops.backends.cpu.addresses import address
from tilewright.ops.backends.cpu.build import ROW_LINEAR
from tilewright.ops.base.dispatch import Case

MOST_ROWS = 8
DTYPES = (torch.float32, torch.bfloat16)


def why_not(machine: Machine, case: Case) -> str | None:
    """The `why_not` of a linear layer for few rows in C++. Builds the library where it is not there yet (seconds)."""
    if case.dtype not in DTYPES:
        return "it reads weights in FP32 or BF16"
    return ROW_LINEAR.why_not(machine, case)


def row_linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Run a linear layer for a few rows, on a CPU in C++: see `ops.linear`.

    Raises:
        TypeError: tensors of several dtypes, of others than FP32 and BF16, or not all on the CPU.
        ValueError: more rows or none, shapes that do not fit, or a weight whose rows are not contiguous.
        MemoryError: no memory for a copy of x.
    """
    dtype, (num_out, width), shape = x.dtype, weight_MK.shape, x.shape
    if (dtype not in DTYPES or weight_MK.dtype != dtype or (bias_M is not None and bias_M.dtype != dtype)) or not (
        x.is_cpu and weight_MK.is_cpu and (bias_M is None or bias_M.is_cpu)
    ):
        raise TypeError(f"FP32 or BF16 for all on the CPU are needed: {dtype}, {weight_MK.dtype} on {weight_MK.device}")
    rows = x.numel() // width if width else 0
    if shape[-1] != width or not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"1 to {MOST_ROWS} rows of {width} are needed: {tuple(shape)}")
    pitch, step = weight_MK.stride()
    if step != 1 and width > 1:
        raise ValueError(f"contiguous rows of the weight are needed: strides {weight_MK.stride()}")
    if bias_M is not None:
        if bias_M.shape != (num_out,):
            raise ValueError(f"a bias of {num_out} is needed: {tuple(bias_M.shape)}")
        bias_M = bias_M.contiguous()
    x, out = x.contiguous(), x.new_empty((*shape[:-1], num_out))
    no_memory = ROW_LINEAR.functions.tw_row_linear(
        dtype == torch.bfloat16, address(x), address(weight_MK), pitch,
        address(bias_M), address(out), rows, num_out, width, torch.get_num_threads(),
    )  # fmt: skip
    if no_memory:
        raise MemoryError(f"no memory for {rows} rows of {width}")
    return out
