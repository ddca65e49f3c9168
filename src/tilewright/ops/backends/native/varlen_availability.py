"""When torch's CUDA kernels for sequences of any length can run attention, by the rules that their source states.

`flash_api.cpp` (mha_varlen_fwd): BF16 and FP16, compute capability 8.0, heads up to 256 wide, grouped or not.
`attention.cu` (_efficient_attention_forward): FP32 too (products of FP32 by three of TF32 from 8.0 on), FP16 below 8.0,
heads of any width, none grouped: keys and values are repeated.
"""

import torch

from tilewright.core.hardware import Machine
from tilewright.ops.base.dispatch import Case, Knows

FLASH_WIDTH = 256
"""The widest head that flash takes."""
WINDOW = "window"
"""The kind of call in which a position sees the last keys alone, packed or not."""
KINDS = ("wide", "packed", "packed_wide", "window_wide")
"""Kinds of call on a GPU beside the plain one and `WINDOW`: heads wider than `FLASH_WIDTH`, rows of several documents,
both; a window and wide heads."""
NO_WINDOW = Knows(("", "wide", "packed", "packed_wide"), "attention to all earlier keys, not to a window of them")
"""Of candidates without a window."""
_LOW = (torch.bfloat16, torch.float16)


def why_not_varlen(machine: Machine, case: Case) -> str | None:
    """Explain why FlashAttention's varlen kernel cannot run here: the `why_not` of its candidate."""
    if reason := _why_no_flash(machine, case):
        return reason
    if case.kind not in ("packed", WINDOW):
        return "rows are not packed: torch takes flash itself"
    return None


def why_not_efficient(machine: Machine, case: Case) -> str | None:
    """Availability of varlen attention by the memory-efficient kernel: its `why_not`."""
    if case.device_type != "cuda":
        return "it is for CUDA devices"
    if case.kind not in NO_WINDOW.kinds:
        return f"it knows {NO_WINDOW.what}"
    if case.dtype not in (torch.float32, *_LOW):
        return "it multiplies FP32, BF16 and FP16"
    if case.dtype == torch.bfloat16 and (machine.capability or (0, 0)) < (8, 0):
        return f"BF16 needs compute capability 8.0, this device has {_dotted(machine)}"
    if case.kind == "" and _why_no_flash(machine, case) is None:
        return "torch takes flash, which needs no repeated heads"
    return None


def _why_no_flash(machine: Machine, case: Case) -> str | None:
    if case.device_type != "cuda":
        return "it is for CUDA devices"
    if case.dtype not in _LOW:
        return "flash multiplies BF16 and FP16"
    if (machine.capability or (0, 0)) < (8, 0):
        return f"flash needs compute capability 8.0, this device has {_dotted(machine)}"
    if case.kind.endswith("wide"):
        return f"heads are wider than {FLASH_WIDTH}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash attention"
    return None


def _dotted(machine: Machine) -> str:
    return ".".join(map(str, machine.capability or (0, 0)))
