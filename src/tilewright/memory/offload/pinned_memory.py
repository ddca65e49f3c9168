"""Host memory that a GPU reads and writes directly: ordinary tensors, registered with the driver.

torch's own pinned memory comes in powers of two (up to twice what was asked for) and is never returned. A tensor that
is registered costs its own bytes.
"""

import logging
import threading
from typing import Any

import torch
from torch import Tensor

from tilewright.core.errors import FitError, HardwareError
from tilewright.core.units import format_bytes

_log = logging.getLogger(__name__)


def pinned_empty(num_bytes: int, device: torch.device) -> Tensor:
    """A pinned, empty buffer: uint8 [num_bytes] on the host; registered where `device` is a GPU. Give it back with
    `unpin`.

    Raises:
        FitError: the system has not so much memory.
        HardwareError: the driver refuses.

    Example:
        >>> pinned_empty(10, torch.device("cpu")).nbytes
        10
    """
    try:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:  # torch's allocator has no class of its own for it
        raise FitError(
            "Host memory is too small for the offloaded tensors",
            got=f"no {format_bytes(num_bytes)} from the system",
            need=f"{format_bytes(num_bytes)} of free host memory",
            try_='memory.offload_optimizer = "disk" or memory.offload_params = "disk", or a smaller model',
            where="memory",
        ) from error
    if device.type == "cuda" and num_bytes:
        buffer.zero_()  # all cores make its pages; the driver would do it on one
        status = int(_runtime().cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
        if status:
            _forget_error(device)
            raise HardwareError(
                "Host memory cannot be registered with the GPU",
                got=f"cudaHostRegister of {num_bytes:,} bytes gave error {status}",
                need="a limit of locked memory that admits the host tier (ulimit -l)",
                try_='the tier "device" or "disk" for parameters, states or inputs, or a larger limit',
            )
    return buffer


def _runtime() -> Any:
    runtime = torch.cuda.cudart()
    assert runtime is not None, "a device of CUDA has one"
    return runtime


def _forget_error(device: torch.device) -> None:
    """Clear the runtime's last error after pinning failed. torch's binding of `cudaHostRegister` leaves it, and the
    next kernel of a caller that continues in another tier would fail with it: so one is launched here that may."""
    try:
        torch.zeros(1, device=device).add_(1)
    except RuntimeError as error:  # torch.AcceleratorError is one; what is not over comes again
        _log.debug("after a failed registration: %s", error)


def unpin(buffer: Tensor, device: torch.device) -> None:
    """Unpin a buffer of `pinned_empty`: take it back from the driver; nothing may be copying to or from it any more."""
    if device.type == "cuda" and buffer.nbytes:
        _runtime().cudaHostUnregister(buffer.data_ptr())


class PinnedBuffers:
    """Buffers of `pinned_empty` that are taken and given back, from any thread: as many as were taken at once.

    Args:
        device: whose copies they are for.

    Example:
        >>> buffers = PinnedBuffers(torch.device("cpu"))
        >>> buffers.give(buffers.take(100))
        >>> len(buffers.take(60)), buffers.num_bytes
        (100, 100)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._all: list[Tensor] = []
        self._free: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all pinned buffers."""
        with self._lock:
            return sum(map(len, self._all))

    def take(self, num_bytes: int) -> Tensor:
        """A pinned buffer, uint8, of at least so many bytes. Where none is large enough, it replaces a smaller one.

        Raises:
            FitError: the system has not so much memory.
            HardwareError: the driver refuses.
        """
        with self._lock:
            self._free.sort(key=len)
            for place, buffer in enumerate(self._free):
                if len(buffer) >= num_bytes:
                    return self._free.pop(place)
            if self._free:
                self._let_go(self._free.pop())
            self._all.append(pinned_empty(num_bytes, self._device))
            return self._all[-1]

    def give(self, buffer: Tensor) -> None:
        """Give a pinned buffer back; nothing copies to or from it any more."""
        with self._lock:
            self._free.append(buffer)

    def close(self) -> None:
        """Close pinned buffers: return all to the system, those too that are still taken; nothing copies to or from
        them any more."""
        with self._lock:
            self._free.clear()
            for buffer in list(self._all):
                self._let_go(buffer)

    def _let_go(self, buffer: Tensor) -> None:
        self._all = [other for other in self._all if other is not buffer]
        unpin(buffer, self._device)
