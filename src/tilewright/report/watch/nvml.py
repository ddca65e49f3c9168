"""Load of NVIDIA GPUs through the driver's own library, without torch and without a package.

Names and structures are those of NVIDIA's NVML API reference (nvmlDeviceGetUtilizationRates, nvmlDeviceGetMemoryInfo).
"""

import ctypes
from typing import Any, Protocol

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlLibrary(Protocol):
    """The functions of the library that are used; each returns 0 where it worked."""

    def nvmlInit_v2(self) -> int: ...

    def nvmlDeviceGetCount_v2(self, count: Any, /) -> int: ...

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any, /) -> int: ...

    def nvmlDeviceGetName(self, handle: Any, name: Any, length: Any, /) -> int: ...

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any, /) -> int: ...

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any, /) -> int: ...


class Nvml:
    """The GPUs of this machine.

    Args:
        library: NVML, initialised.
    """

    def __init__(self, library: NvmlLibrary) -> None:
        self._library = library
        count = ctypes.c_uint()
        found = library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        self._devices = [self._device(index) for index in range(count.value if found else 0)]

    @classmethod
    def open(cls) -> "Nvml | None":
        """The GPUs, None where there is no driver or it does not start."""
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return None
        return cls(library) if library.nvmlInit_v2() == 0 else None

    def sample(self) -> list[dict[str, Any]]:
        """For each GPU its name, share of time with a kernel in percent, and memory in bytes; None: not known."""
        return [{"name": name, **self._load(handle)} for handle, name in self._devices]

    def _device(self, index: int) -> tuple[ctypes.c_void_p, str]:
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
        self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        known = self._library.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES)) == 0
        return handle, name.value.decode("utf-8", errors="replace") if known else f"GPU {index}"

    def _load(self, handle: ctypes.c_void_p) -> dict[str, Any]:
        rates, memory = _Utilization(), _Memory()
        busy = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0
        held = self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        return {
            "percent": rates.gpu if busy else None,
            "memory_used_bytes": memory.used if held else None,
            "memory_bytes": memory.total if held else None,
        }
