"""Load and energy of NVIDIA GPUs through the driver's own library, without torch and without a package.

Names and structures are those of NVIDIA's NVML API reference (nvmlDeviceGetUtilizationRates, nvmlDeviceGetMemoryInfo,
nvmlDeviceGetTotalEnergyConsumption in millijoules since the driver was loaded, nvmlDeviceGetPowerUsage in milliwatts).
"""

import ctypes
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from tilewright.energy.counter import Counter, MeteredPart

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_MILLI = 1e-3


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

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, length: Any, /) -> int: ...

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, millijoules: Any, /) -> int: ...

    def nvmlDeviceGetPowerUsage(self, handle: Any, milliwatts: Any, /) -> int: ...


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
        """Open NVML: the GPUs, None where there is no driver or it does not start."""
        try:
            library = cast(NvmlLibrary, ctypes.CDLL(_LIBRARY))  # its functions are found by name
        except OSError:
            return None
        return cls(library) if library.nvmlInit_v2() == 0 else None

    def sample(self) -> list[dict[str, Any]]:
        """Sample each GPU by NVML: name, percent of time with a kernel, and memory in bytes; None: not known."""
        return [{"name": name, **self._load(handle)} for handle, name in self._devices]

    def counters(self, uuids: Collection[str]) -> tuple[Counter, ...]:
        """Energy counters of GPUs by NVML: their own (since Volta), else counters of their sampled power.

        Args:
            uuids: of those that are meant, with or without `GPU-`.
        """
        meant = {uuid.removeprefix("GPU-") for uuid in uuids}
        found: list[Counter] = []
        for handle, name in self._devices:
            uuid = self._uuid(handle)
            if uuid not in meant:
                continue
            for kind in (_EnergyCounter, _PowerCounter):
                counter = kind(self._library, handle, f"{name} {uuid[:8]}")
                if _can_be_read(counter):
                    found.append(counter)
                    break
        return tuple(found)

    def _uuid(self, handle: ctypes.c_void_p) -> str:
        uuid = ctypes.create_string_buffer(_NAME_BYTES)
        known = self._library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_NAME_BYTES)) == 0
        return uuid.value.decode("ascii", errors="replace").removeprefix("GPU-") if known else ""

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


class _EnergyCounter:
    """Millijoules since the driver was loaded, in 64 bits."""

    wraps_at: float | None = None

    def __init__(self, library: NvmlLibrary, handle: ctypes.c_void_p, name: str) -> None:
        self._library, self._handle = library, handle
        self.part = MeteredPart(name, f"{name}: the GPU's board with its memory", "NVML's energy counter", board=True)

    def read(self, now: float) -> float:
        """Read NVML's energy counter: see `Counter.read`."""
        millijoules = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        if code != 0:
            raise OSError(f"NVML answers {code}")
        return millijoules.value * _MILLI


@dataclass
class _PowerCounter:
    """The sum of power times the seconds until the reading after it."""

    library: NvmlLibrary
    handle: ctypes.c_void_p
    name: str
    wraps_at: float | None = field(default=None, init=False)
    _joules: float = field(default=0.0, init=False)
    _watts: float = field(default=0.0, init=False)
    _at: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        covers = f"{self.name}: the GPU's board with its memory"
        self.part = MeteredPart(self.name, covers, "NVML's power, sampled", sampled=True, board=True)

    def read(self, now: float) -> float:
        """Read NVML's power as a counter: see `Counter.read`."""
        milliwatts = ctypes.c_uint()
        code = self.library.nvmlDeviceGetPowerUsage(self.handle, ctypes.byref(milliwatts))
        if code != 0:
            raise OSError(f"NVML answers {code}")
        if self._at is not None:
            self._joules += self._watts * (now - self._at)
        self._watts, self._at = milliwatts.value * _MILLI, now
        return self._joules


def _can_be_read(counter: Counter) -> bool:
    try:
        counter.read(0.0)
    except OSError:
        return False
    return True
