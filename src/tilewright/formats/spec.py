"""The range and precision of floating-point formats, and rounding to the wider ones, bit for bit.

Not scaling, tiles or storage: those come on top (`encode` rounds to the 8-bit formats). Rounding is to nearest,
ties to even, by integer arithmetic on the FP32 bits where torch has no dtype for the format (TF32), by torch's own
cast where it has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP32_MANTISSA_BITS = 23


@dataclass(frozen=True)
class FloatSpec:
    """A binary floating-point format with subnormals and NaN, in the layout of IEEE 754.

    Args:
        name: as written in recipes.
        bits: sign, exponent and mantissa together. TF32 has 19, and is stored in 32.
        exponent_bits: width of the exponent.
        mantissa_bits: width of the fraction, without the hidden one.
        dtype: the torch dtype that values of this format are kept in.
        has_infinity: False where the highest exponent holds numbers too, and only all ones is NaN (E4M3).
        has_nan: False where every code is a number (E2M1): what is not finite is then marked by its tile's scale.

    Example:
        >>> BF16.max, FP16.max, E4M3.max, E5M2.max, E2M1.max, TF32.eps == 2.0**-10
        (3.3895313892515355e+38, 65504.0, 448.0, 57344.0, 6.0, True)
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype
    has_infinity: bool = True
    has_nan: bool = True

    @property
    def bias(self) -> int:
        """The bias of a float format, added to an exponent before it is stored."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value of a format's spec."""
        return self.bias if self.has_infinity else self.bias + 1

    @property
    def max(self) -> float:
        """Largest finite value of a format's spec."""
        all_ones_is_nan = self.has_nan and not self.has_infinity
        return (2.0 - (2 * self.eps if all_ones_is_nan else self.eps)) * 2.0**self.max_exponent

    @property
    def tiny(self) -> float:
        """Smallest positive normal value of a format's spec."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """Smallest positive value (subnormal) of a format's spec."""
        return self.tiny * self.eps

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger value of a format. A rounding error is at most half of it,
        relative."""
        return 2.0**-self.mantissa_bits


FP32 = FloatSpec("fp32", 32, 8, 23, torch.float32)
TF32 = FloatSpec("tf32", 19, 8, 10, torch.float32)
BF16 = FloatSpec("bf16", 16, 8, 7, torch.bfloat16)
FP16 = FloatSpec("fp16", 16, 5, 10, torch.float16)
E4M3 = FloatSpec("e4m3", 8, 4, 3, torch.float8_e4m3fn, has_infinity=False)
E5M2 = FloatSpec("e5m2", 8, 5, 2, torch.float8_e5m2)
E2M1 = FloatSpec("e2m1", 4, 2, 1, torch.float4_e2m1fn_x2, has_infinity=False, has_nan=False)
SPECS = {spec.name: spec for spec in (FP32, TF32, BF16, FP16)}
"""Formats that values are computed in without a scale."""
FP8_SPECS = {spec.name: spec for spec in (E4M3, E5M2)}
"""Formats that need a scale: 8 bits per element."""


def round_to(x: Tensor, spec: FloatSpec) -> Tensor:
    """Round `x` to the nearest values of a float format, ties to even; the result is FP32.

    Overflow gives infinity, NaN stays NaN, the sign of zero is kept.

    Args:
        x: FP32, any shape.
        spec: the format.

    Raises:
        TypeError: `x` is not FP32, or the format has 8 bits or fewer (see `encode.encode`).

    Example:
        >>> round_to(torch.tensor([1.0 + 2**-11, 1.0 + 3 * 2**-11]), TF32)  # two ties: down to 1, up to 1 + 2^-9
        tensor([1.0000, 1.0020])
    """
    if x.dtype != torch.float32:
        raise TypeError(f"round_to takes FP32 values, not {x.dtype}")
    if spec.bits <= 8:
        raise TypeError(f"round_to does not scale, which {spec.name} needs: use formats.quantize")
    if spec.dtype != torch.float32:
        return x.to(spec.dtype).to(torch.float32)
    dropped = FP32_MANTISSA_BITS - spec.mantissa_bits
    if dropped == 0:
        return x
    bits = x.view(torch.int32)
    half_below = (1 << (dropped - 1)) - 1
    last_kept = (bits >> dropped) & 1
    rounded = (bits + half_below + last_kept) & -(1 << dropped)  # a carry runs into the exponent, up to infinity
    return torch.where(torch.isnan(x), x, rounded.view(torch.float32))
