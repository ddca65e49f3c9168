"""When the Triton kernels can run. Imports no triton: `ops` asks before it does."""

import torch

from tilewright.core.hardware import Machine
from tilewright.ops.base.dispatch import Case

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def needs_triton(machine: Machine, case: Case) -> str | None:
    """Explain why Triton cannot run here: the `why_not` of its candidates."""
    if case.device_type != "cuda":
        return "Triton kernels run on CUDA devices"
    if case.dtype not in _DTYPES:
        return f"the kernels take FP32, BF16 and FP16, not {str(case.dtype).removeprefix('torch.')}"
    if "cuda" not in machine.versions:
        return "a torch build without CUDA (the kernels are written for NVIDIA's 8-bit formats)"
    if "triton" not in machine.versions:
        return "triton is not installed (torch's CUDA builds for Linux bring it)"
    if machine.capability is None or machine.capability < (8, 0):
        return f"the kernels need compute capability 8.0 or later, this device has {_dotted(machine.capability)}"
    return None


def _dotted(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else f"{capability[0]}.{capability[1]}"
