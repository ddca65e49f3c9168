"""Host copies of a training state, in memory that is reused from save to save.

The copy is what training waits for; the disk is not. CUDA tensors are copied into one buffer, registered with the
driver, at the speed of the link: torch's own pinned memory would round each tensor up to a power of two, and small
buffers of their own would share pages, which are registered once. They hold as many bytes as the state itself, from the
first save on; of a state in shards, as many as this rank's.
"""

import math
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from tilewright.core.errors import HardwareError
from tilewright.core.log import get_logger
from tilewright.memory.offload.pinned import pinned_empty, unpin
from tilewright.ops.base.parts import local

_ALIGN = 64
"""Bytes between which tensors begin."""
_log = get_logger(__name__)


class Staging:
    """Copies named tensors into host memory. One copy is alive at a time: the next one overwrites it."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}
        self._layout: object = None
        self._free = weakref.finalize(self, lambda: None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that it holds."""
        return sum(part.nbytes for part in self._parts.values())

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous host copies of `tensors` under the same names, of DTensors this rank's shards; done when this
        returns.

        Values, dtypes and shapes are those of the tensors at the moment of the call.
        """
        tensors = {name: local(tensor).detach() for name, tensor in tensors.items()}
        on_gpu = [tensor.device for tensor in tensors.values() if tensor.is_cuda]
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()], bool(on_gpu)
        if layout != self._layout:
            self._make_room(tensors, on_gpu[0] if on_gpu else torch.device("cpu"))
            self._layout = layout
        for name, tensor in tensors.items():
            self._parts[name].copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return dict(self._parts)

    def _make_room(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Memory for these tensors, in the place of what was there before, which is given back first."""
        self._parts, self._layout = {}, None
        self._free()
        if device.type == "cpu":
            self._parts = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
            return
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += math.ceil(tensor.numel() * tensor.element_size() / _ALIGN) * _ALIGN
        try:
            buffer = pinned_empty(end, device)
        except HardwareError as error:  # a state that is saved slowly is better than one that is not
            _log.warning("copies for checkpoints are not registered with the GPU, so they take longer: %s", error)
            device = torch.device("cpu")
            buffer = pinned_empty(end, device)
        self._free = weakref.finalize(self, unpin, buffer, device)
        for name, tensor in tensors.items():
            part = buffer[starts[name] : starts[name] + tensor.numel() * tensor.element_size()]
            self._parts[name] = part.view(tensor.dtype).view(tensor.shape)
