"""Host copies of a training state, in buffers that are reused from save to save.

The copy is what training waits for; the disk is not. Buffers of CUDA tensors are pinned, so that their copies
run at the speed of the link. They hold as many bytes as the state itself, from the first save on; of a state in shards,
as many as this rank's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewright.parallel.parts import local_part


class Staging:
    """Copies named tensors into host memory. One copy is alive at a time: the next one overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffers hold."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous host copies of `tensors` under the same names, of DTensors this rank's shards; done when this
        returns.

        Values, dtypes and shapes are those of the tensors at the moment of the call.
        """
        tensors = {name: local_part(tensor) for name, tensor in tensors.items()}
        for name in self._buffers.keys() - tensors.keys():
            del self._buffers[name]
        for name, tensor in tensors.items():
            self._buffer(name, tensor).copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return dict(self._buffers)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer
