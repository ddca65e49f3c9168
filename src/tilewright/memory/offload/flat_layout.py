"""Where tensors are in a flat stretch of bytes, and what is in for those that are elsewhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN = 256
"""Tensors start at multiples of it, in bytes: no kernel asks for more."""


@dataclass(frozen=True)
class Layout:
    """Start, shape and dtype of each tensor, and the bytes of all together."""

    places: Mapping[str, tuple[int, torch.Size, torch.dtype]]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """The flat layout of tensors of these shapes and dtypes."""
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = (end, tensor.shape, tensor.dtype)
            end += -(-tensor.numel() * tensor.itemsize // _ALIGN) * _ALIGN
        return cls(places, end)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """View the tensors of a flat layout in `flat` (uint8, at least `num_bytes`)."""
        return {
            name: flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (start, shape, dtype) in self.places.items()
        }


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Make a placeholder for a tensor of a flat layout: one value in this shape, NaN or the largest integer. Each call
    has memory of its own.

    Example:
        >>> placeholder((2, 3), torch.bfloat16, "cpu").isnan().all().item()
        True
    """
    if dtype.is_floating_point or dtype.is_complex:
        value = float("nan")
    else:
        value = True if dtype == torch.bool else torch.iinfo(dtype).max
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))
