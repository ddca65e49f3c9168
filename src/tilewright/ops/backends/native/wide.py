"""16-bit operands multiplied in FP32, for CPUs that have no 16-bit matrix instructions: where, and a plain matmul.

torch's own 16-bit matmul on such a CPU (oneDNN's emulation) ran at a quarter of the speed of its FP32 matmul
(docs/log.md, 2026-11-21). Matmuls of 16-bit numbers are exact in FP32, so only the order of the sums differs.
Loss and attention ask `widens`; the linear layer is in `wide_linear`.
"""

import functools

import torch
from torch import Tensor

from tilewright.core.hardware import Machine, cpu_features, cpu_multiplies
from tilewright.ops.base.dispatch import Case


def why_not(machine: Machine, case: Case) -> str | None:
    """The `why_not` of candidates that widen."""
    if case.device_type != "cpu" or case.dtype not in (torch.bfloat16, torch.float16):
        return "it is for 16-bit operands on CPUs"
    return "the CPU multiplies this format itself" if machine.cpu_multiplies(case.dtype) else None


def widens(device_type: str, dtype: torch.dtype) -> bool:
    """Whether matmuls of this dtype are faster in FP32 on this device: a CPU without instructions for them."""
    if torch.compiler.is_compiling():
        from tilewright.ops.base.opaque import constant  # its decorators take seconds to import

        return device_type == "cpu" and not constant(_cpu_has, dtype)
    return device_type == "cpu" and not _cpu_has(dtype)


def _cpu_has(dtype: torch.dtype) -> bool:
    return cpu_multiplies(dtype, _features())


@functools.cache
def _features() -> frozenset[str]:
    return cpu_features()


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b with FP32 operands, rounded to a's dtype: into `out`, where given."""
    matmul = a.float() @ b.float()
    return matmul.to(a.dtype) if out is None else out.copy_(matmul)
