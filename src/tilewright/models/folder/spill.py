"""Tensors that wait on the disk for the file that they go into.

A safetensors file is written from tensors that are all there. Those of a model whose weights come one at a time, from a
disk or from other ranks, wait in files of their own, and are mapped: memory holds of them what it has room for.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor


@contextmanager
def spilled(folder: Path) -> Iterator[Callable[[Tensor], Tensor]]:
    """A function that copies a tensor into a file beside the others and returns it mapped, to be read until the end.

    Args:
        folder: on whose disk they wait; it must exist. Nothing is left in it.

    Raises:
        OSError: (inside) no room.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder, spilled(Path(folder)) as spill:
        ...     spill(torch.arange(3.0))
        tensor([0., 1., 2.])
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".waiting-", ignore_cleanup_errors=True) as waiting:
        number = 0

        def spill(tensor: Tensor) -> Tensor:
            nonlocal number
            number += 1
            tensor = tensor.detach().cpu().contiguous()
            if tensor.numel() == 0:
                return tensor.clone()
            path = Path(waiting) / str(number)
            path.write_bytes(tensor.reshape(-1).view(torch.uint8).numpy().data)
            mapped = torch.from_file(str(path), shared=False, size=tensor.numel(), dtype=tensor.dtype)
            return mapped.view(tensor.shape)

        yield spill
