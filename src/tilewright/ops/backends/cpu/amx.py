"""AMX tiles: the right of this process to use them, and a library built for them."""

import ctypes
import functools

import torch

from tilewright.core.errors import HardwareError
from tilewright.core.hardware import Machine
from tilewright.ops.backends.cpu.build import Library
from tilewright.ops.base.dispatch import Case


def why_not(library: Library, machine: Machine, case: Case) -> str | None:
    """The `why_not` of candidates in C++ that use AMX tiles. Builds the library where it is not there yet (seconds)."""
    if case.device_type != "cpu" or case.dtype != torch.bfloat16:
        return "it is for BF16 on CPUs"
    if "amx_bf16" not in machine.cpu_features:
        return "the CPU has no AMX tiles for BF16, or torch may not use them"
    if "avx512f" not in machine.cpu_features:
        return "its code beside the tiles needs AVX-512"
    return library.why_not(machine, case) or _refused(library)


def functions(library: Library) -> ctypes.CDLL:
    """Functions of the AMX library, when the system lets this process use tiles; without its leave they end the
    process.

    Raises:
        HardwareError: it does not.
    """
    reason = _refused(library)
    if reason:
        raise HardwareError(reason, got="the system call was refused", need="a kernel that allows AMX", try_=_TRY)
    return library.functions


_TRY = '[ops] linear = "native" and attention = "native"'


@functools.cache
def _refused(library: Library) -> str | None:
    return "the system does not let this process use AMX tiles" if library.functions.tw_ask_for_tiles() else None
