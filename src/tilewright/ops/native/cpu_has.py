"""What this CPU multiplies itself, asked once per dtype."""

import functools

import torch

from tilewright.core.hardware import cpu_features, cpu_multiplies


@functools.cache
def cpu_has(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies a dtype itself."""
    return cpu_multiplies(dtype, cpu_features())
