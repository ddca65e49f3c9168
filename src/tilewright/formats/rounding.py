"""FP32 numbers rounded stochastically: to BF16, and to 24 bits in two parts.

The two parts are the BF16 number nearest to the 24-bit one, and 8 bits of correction. They are stored apart: layers
multiply with the BF16 weight as it is, and the optimizer reads both. As integers, the FP32 pattern of the number is
(BF16 pattern << 16) + (correction << 8), the correction from -128 to 127. That of a zero, an infinity or NaN does not
count, whatever it is.

Where someone else writes the weight, the correction beside it is another number's, and a pair does not tell: all its 24
bits are bits of a number. It makes the weight half a BF16 step wrong at most, about as much as its own rounding to BF16
did. A zero and what is not finite are exact, and so is a change of the sign or by a power of two.

This file is the definition; `ops/backends/cpu/cpp/low_bit_adam.cpp` and `ops/backends/triton/low_bit_adam.py` have the
same bits.
"""

import torch
from torch import Tensor

_EXPONENT = 0x7F800000


def round_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """Stochastic rounding of FP32 numbers to BF16, up or down with probability by distance.

    Args:
        x: FP32.
        noise: int32 from 0 to 65535, of x's shape.

    Example:
        >>> x = torch.full((65536,), 1.0 + 2**-9)  # a quarter of a step above 1
        >>> round_bf16(x, torch.arange(65536, dtype=torch.int32)).float().mean().item()
        1.001953125
    """
    bits = x.view(torch.int32)
    finite = (bits & _EXPONENT) != _EXPONENT
    high = torch.where(finite, (bits + noise) >> 16, _not_finite(bits))
    return high.to(torch.int16).view(torch.bfloat16)


def split24(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Split FP32 numbers into BF16 and int8 by stochastic rounding to 24 bits. A number that BF16 has as zero or as
    infinity is rounded to that.

    Args:
        x: FP32.
        noise: int32 from 0 to 255, of x's shape.

    Example:
        >>> x = torch.tensor([1.0, 1.0 + 2**-8 + 2**-15])
        >>> weight, low = split24(x, torch.zeros(2, dtype=torch.int32))
        >>> weight.tolist(), low.tolist(), bool((join24(weight, low) == x).all())
        ([1.0, 1.0078125], [0, -127], True)
    """
    bits = x.view(torch.int32)
    finite = (bits & _EXPONENT) != _EXPONENT
    rounded = (bits + noise) & -256
    nearest = (rounded + 0x8000) >> 16
    high = torch.where(finite, nearest, _not_finite(bits))
    low = (rounded - (nearest << 16)) >> 8
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int8)


def join24(weight: Tensor, low: Tensor) -> Tensor:
    """FP32 numbers of the two parts of rounding to 24 bits.

    Example:
        >>> written = torch.tensor([0.0, -0.0, 1.0], dtype=torch.bfloat16)  # beside corrections of other numbers
        >>> join24(written, torch.tensor([-1, 5, 0], dtype=torch.int8))
        tensor([0., -0., 1.])
    """
    bits = weight.view(torch.int16).to(torch.int32) << 16
    bits = bits + torch.where(_has_correction(bits), low.to(torch.int32) << 8, 0)
    return bits.view(torch.float32)


def _has_correction(bits: Tensor) -> Tensor:
    """True of FP32 patterns that rounding to 24 bits corrects: neither zero, whose neighbours as integers are no
    neighbours as numbers, nor not finite."""
    magnitude = bits & 0x7FFFFFFF
    return (magnitude != 0) & (magnitude < _EXPONENT)


def _not_finite(bits: Tensor) -> Tensor:
    """The BF16 patterns of infinities and NaN from their FP32 patterns; a NaN stays one."""
    return (bits >> 16) | ((bits & 0x7FFFFF) != 0).to(torch.int32) * 0x40
