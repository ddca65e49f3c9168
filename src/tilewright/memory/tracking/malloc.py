"""glibc's allocator: its own count of bytes, and what it keeps of freed blocks back to the system.

Without glibc there is no count, and nothing is given back. No torch here: processes of a data build use it too.
"""

import ctypes
import os
from typing import Any

_MALLINFO_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later: uordblks = bytes in use in arenas, hblkhd = in mapped blocks,
    fordblks = free in arenas."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO_FIELDS)


def find_mallinfo() -> Any:
    """Find glibc's mallinfo2, its count of allocated bytes; None in other C libraries."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None) if os.name == "posix" else None
    if function is not None:
        function.argtypes, function.restype = (), _MallInfo
    return function


def trim_malloc() -> None:
    """Let glibc return to the system what it keeps of freed blocks. Nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
