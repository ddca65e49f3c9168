"""Bytes by owner and phase as plain text: of a plan, and of what was measured when memory ran out."""

from collections.abc import Mapping

import torch

from tilewright.core.units import format_bytes
from tilewright.memory.tracking.tracker import OWNERS

_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""How torch's CPU allocator says it, in an error without a class of its own (Linux and Windows)."""


def phase_table(phases: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Format bytes by owner and phase as a table: a line per owner that has some, a column per phase, the sums last.

    Example:
        >>> print("\\n".join(phase_table({"forward": {"parameters": 2**30}, "update": {"parameters": 2**30}})))
        bytes            forward      update
        parameters      1.00 GiB    1.00 GiB
        sum             1.00 GiB    1.00 GiB
    """
    lines = [f"{'bytes':<12}" + "".join(f"{phase:>12}" for phase in phases)]
    for owner in OWNERS:
        cells = [owners.get(owner, 0) for owners in phases.values()]
        if any(cells):
            lines.append(f"{owner:<12}" + "".join(f"{format_bytes(cell) if cell else '-':>12}" for cell in cells))
    lines.append(f"{'sum':<12}" + "".join(f"{format_bytes(sum(owners.values())):>12}" for owners in phases.values()))
    return lines


def is_out_of_memory(error: BaseException) -> bool:
    """True where an error's text has the format of out-of-memory, on the device or on the host.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
        (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
