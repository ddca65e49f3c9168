"""FP32 values to codes of 8 bits or fewer and back, by integer arithmetic, the same bits on every machine.

torch's own casts are not used: they overflow to NaN up to torch 2.11 and saturate from 2.12 on, and run at a
fraction of memory speed on CPUs. Everything here is element-wise and compiles into one loop.
Scales come before and after: see `scaling` and `quantize`. E8M0, the format of power-of-two scales, is here too.

See: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; OCP Microscaling Formats (MX) v1.0, section 5.4.
"""

import math

import torch
from torch import Tensor

from tilewright.formats.spec import FP32_MANTISSA_BITS, FloatSpec

NAN_CODE = 0x7F
"""The code of every non-finite value, in E4M3 and E5M2 alike. Without a sign, because a NaN's is left to the machine
that computed it: zero times infinity has one on x86 and none on ARM, and GPUs' conversions drop it."""
E8M0_BIAS = 127
E8M0_NAN = 0xFF
_FP32_BIAS = 127
_FP32_INF_BITS = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_FIXED_POINT_BITS = 20
"""Binary places of a subnormal, in steps of the format, that stochastic rounding looks at."""


def encode(x: Tensor, spec: FloatSpec, noise: Tensor | None = None) -> Tensor:
    """Round FP32 values to codes of a format of 8 bits or fewer.

    Finite values beyond the largest saturate to it, because a scale is chosen such that they are rounding errors.
    Infinities and NaN become NaN, all ones but the sign: an overflow upstream must stay visible. In a format
    without NaN that is a number, and the scale has to tell (see `quantize`).

    Args:
        x: FP32, any shape.
        spec: the format: a sign, exponent and mantissa of any widths that sum to 8 or fewer.
        noise: int32 of x's shape, uniform over all bits, for stochastic rounding: up with the probability of the
            part cut off. None rounds to nearest, ties to even.

    Returns:
        uint8 codes of x's shape.

    Example:
        >>> from tilewright.formats.spec import E4M3
        >>> qdata = encode(torch.tensor([1.0, -0.4375, 1000.0, float("inf")]), E4M3)
        >>> qdata.tolist(), decode(qdata, E4M3).tolist()
        ([56, 174, 126, 127], [1.0, -0.4375, 448.0, nan])
    """
    dropped = FP32_MANTISSA_BITS - spec.mantissa_bits
    bits = x.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    finite = magnitude < _FP32_INF_BITS
    magnitude = magnitude.clamp(max=_bits(spec.max))
    if noise is None:
        carry = ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)
    else:
        carry = noise & ((1 << dropped) - 1)
    normal = ((magnitude + carry) >> dropped) - ((_FP32_BIAS - spec.bias) << spec.mantissa_bits)
    is_normal = magnitude >= _bits(spec.tiny)
    code = torch.where(is_normal, normal, _encode_subnormal(magnitude.view(torch.float32), spec, noise))
    sign = 1 << (spec.bits - 1)
    return torch.where(finite, code | ((bits >> (32 - spec.bits)) & sign), sign - 1).to(torch.uint8)


def _encode_subnormal(magnitude: Tensor, spec: FloatSpec, noise: Tensor | None) -> Tensor:
    """Encode subnormal values as multiples of the smallest one; garbage where the magnitude is normal."""
    if noise is None:
        magic = spec.smallest * 2.0**FP32_MANTISSA_BITS  # where FP32's own last place is the smallest value
        return (magnitude + magic).view(torch.int32) - _bits(magic)
    steps = (magnitude.clamp(max=spec.tiny) * (2.0**_FIXED_POINT_BITS / spec.smallest)).to(torch.int32)
    return (steps + (noise & ((1 << _FIXED_POINT_BITS) - 1))) >> _FIXED_POINT_BITS


def decode(qdata: Tensor, spec: FloatSpec) -> Tensor:
    """Decode what was encoded to FP32 values. Infinities of E5M2, which `encode` never writes, come back as infinities.

    Args:
        qdata: uint8, any shape, a code in the low `spec.bits` of each.
        spec: the format.
    """
    wide, all_ones = qdata.to(torch.int32), (1 << (spec.bits - 1)) - 1
    magnitude = wide & all_ones
    dropped = FP32_MANTISSA_BITS - spec.mantissa_bits
    rebias = (_FP32_BIAS - spec.bias) << FP32_MANTISSA_BITS
    normal = ((magnitude << dropped) + rebias).view(torch.float32)
    # A subnormal is read as tiny + itself. (As FP32 subnormals, its bits would take the processor's slow path.)
    subnormal = ((magnitude << dropped) + _bits(spec.tiny)).view(torch.float32) - spec.tiny
    value = torch.where(magnitude < (1 << spec.mantissa_bits), subnormal, normal)
    if spec.has_infinity:
        value = torch.where(magnitude == _infinity_code(spec), torch.inf, value)
    if spec.has_nan:
        first_nan = _infinity_code(spec) + 1 if spec.has_infinity else all_ones
        value = torch.where(magnitude >= first_nan, torch.nan, value)
    sign = (wide & (all_ones + 1)) << (32 - spec.bits)
    return (value.view(torch.int32) | sign).view(torch.float32)


def _infinity_code(spec: FloatSpec) -> int:
    return ((1 << spec.exponent_bits) - 1) << spec.mantissa_bits


def encode_e8m0(exponent: Tensor) -> Tensor:
    """Encode 2^exponent in E8M0: uint8 codes of integers that saturate at -127 and 127."""
    return (exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)


def decode_e8m0(qdata: Tensor) -> Tensor:
    """Decode E8M0 codes to FP32 powers of two; 255 is NaN."""
    value = torch.ldexp(torch.ones(qdata.shape, device=qdata.device), qdata.to(torch.int32) - E8M0_BIAS)
    return torch.where(qdata == E8M0_NAN, torch.nan, value)


def _bits(value: float) -> int:
    """The FP32 bits of a positive normal value, which must be exact in FP32."""
    mantissa, exponent = math.frexp(value)  # not by a tensor: this runs while code is traced
    return ((exponent - 1 + _FP32_BIAS) << FP32_MANTISSA_BITS) + int((2 * mantissa - 1) * 2**FP32_MANTISSA_BITS)
