"""How kernels are launched and what the device offers: the few facts that all modules of this folder share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from tilewright.formats.scaling import exponent_range
from tilewright.formats.spec import FloatSpec

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU (TRITON_INTERPRET=1 when this module was imported)."""
TILE = 128
"""Elements that share a scale along the summed dimension."""


def num_tiles(length: int) -> int:
    """Count the tiles along a dimension of so many elements, for Triton kernels."""
    return (length + TILE - 1) // TILE


def wrap_triton(kernel: Any) -> Any:
    """Launch of Triton kernels by torch's wrapper, by which `torch.compile` sees a launch; interpreted kernels are
    launched as they are.

    (torch 2.11's own refuses interpreted ones. The name is torch's because torch finds the kernels of an operation, for
    the key of its cache, by looking for calls of this name.)
    """
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


def triton_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Declare an operation `tilewright::name` that launches Triton kernels, so that `torch.compile` sees them."""
    return torch.library.triton_op(f"tilewright::{name}", mutates_args=())


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; (0, 0) where none can be asked (interpreter, tracing)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def has_fp8(device: torch.device) -> bool:
    """True if Triton kernels on this device can convert to 8-bit floats and multiply them (compute capability 8.9 and
    later)."""
    return capability(device) >= (8, 9)


def constants(spec: FloatSpec) -> dict[str, int]:
    """The constants of a float format that Triton kernels take: see `encode.encode_tile`."""
    least, most = exponent_range(spec)
    max_mantissa = int((spec.max / 2.0**spec.max_exponent - 1) * 2**23)
    return {
        "MANTISSA": spec.mantissa_bits,
        "BIAS": spec.bias,
        "MAX_BITS": ((spec.max_exponent + 127) << 23) + max_mantissa,
        "LEAST": least,
        "MOST": most,
    }


def raw(x: Tensor) -> Tensor:
    """View x as Triton kernels take it: BF16 as int16 in the interpreter, whose BF16 conversions are not exact."""
    return x.view(torch.int16) if INTERPRETED and x.dtype == torch.bfloat16 else x
