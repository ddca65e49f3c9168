"""When torch's `scaled_mm` can run a matmul of tiles, by the rules that its source states (see `scaled_mm`)."""

import torch
from torch.nn import functional as F

from tilewright.core.hardware import Machine
from tilewright.ops.base.dispatch import Case

_NONE: tuple[int, int] = (0, 0)


def needs_scaled_mm(machine: Machine, case: Case) -> str | None:
    """Availability of `scaled_mm`: its `why_not`."""
    if case.device_type != "cuda":
        return "cuBLAS runs on CUDA devices"
    if case.dtype == torch.float64:
        return "8-bit matmuls have no FP64 result"
    if not hasattr(F, "scaled_mm"):
        return "this torch has no torch.nn.functional.scaled_mm (2.10 and later have)"
    if "cuda" not in machine.versions:
        return "a torch build without CUDA"
    capability = machine.capability or _NONE
    if case.kind == "tensorwise":
        if capability < (8, 9):
            return f"no 8-bit matrix unit: compute capability {_dotted(capability)}, 8.9 needed"
        return None
    if capability[0] != 9:
        return f"cuBLAS has scales by tile for compute capability 9 only, this device has {_dotted(capability)}"
    if _version(machine.versions["cuda"]) < (12, 9):
        return f"cuBLAS has scales by tile from CUDA 12.9 on, torch was built with {machine.versions['cuda']}"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = (*text.split("."), "0")
    return int(major), int(minor)
