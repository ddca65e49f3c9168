"""quantize, quantize_both, rms_norm_quantize, swiglu_quantize: 8-bit copies with a scale per tile. No autograd.

quantize(x_MK, spec, tile, power_of_two=True, noise=None) -> TiledTensor [M, K].
quantize_both(x_MK, spec, power_of_two=True) -> (row, column), from one read of x: `row` is x in tiles of 1x128, and
`column` is x transposed in tiles of 1x128 along the tokens, a TiledTensor [K, M]; on CPU its codes are a transposed
view. `formats.quantize` is the definition: codes and scales of every candidate are equal to its, bit for bit.
x is FP32, BF16 or FP16. The case's dtype is x's.

rms_norm_quantize(x, weight_D, eps, spec, power_of_two=True) -> (y, row, column)
swiglu_quantize(gate, up, spec, power_of_two=True) -> (y, row, column)
A norm or activation and 8-bit copies of its result: y is what `rms_norm` and `swiglu` return, in x's dtype and shape
[..., D]; row and column are `quantize_both` of y as [tokens, D]. The copies are of y as rounded to its dtype. The
case's dtype is x's (gate's).
"""

from tilewright.formats.tiled import TiledTensor
from tilewright.ops.backends.cpu.build import FP8
from tilewright.ops.backends.ref import fp8 as ref
from tilewright.ops.backends.ref import math
from tilewright.ops.backends.triton.availability import needs_triton
from tilewright.ops.base.dispatch import Candidate, Op, always
from tilewright.ops.norm import native as rms_norm


def _triton(x_MK, spec, tile, power_of_two=True, noise=None) -> TiledTensor:
    from tilewright.ops.backends.triton import quantize  # it imports triton

    return quantize.quantize(x_MK, spec, tile, power_of_two, noise)


def _triton_both(x_MK, spec, power_of_two=True) -> tuple[TiledTensor, TiledTensor]:
    from tilewright.ops.backends.triton import quantize  # it imports triton

    return quantize.quantize_both(x_MK, spec, power_of_two)


def _cpu(x_MK, spec, tile, power_of_two=True, noise=None) -> TiledTensor:
    from tilewright.ops.backends.cpu import fp8  # it registers torch operators

    return fp8.quantize(x_MK, spec, tile, power_of_two, noise)


def _cpu_both(x_MK, spec, power_of_two=True) -> tuple[TiledTensor, TiledTensor]:
    from tilewright.ops.backends.cpu import fp8  # it registers torch operators

    return fp8.quantize_both(x_MK, spec, power_of_two)


QUANTIZE = Op(
    "quantize",
    (
        Candidate("triton", _triton, needs_triton),
        Candidate("cpu", _cpu, FP8.why_not),
        Candidate("ref", ref.quantize, always),
    ),
)
QUANTIZE_BOTH = Op(
    "quantize_both",
    (
        Candidate("triton", _triton_both, needs_triton),
        Candidate("cpu", _cpu_both, FP8.why_not),
        Candidate("ref", ref.quantize_both, always),
    ),
    setting="quantize",
)


def _triton_norm(x, weight_D, eps, spec, power_of_two=True):
    from tilewright.ops.backends.triton import fused  # it imports triton

    return fused.rms_norm_quantize(x, weight_D, eps, spec, power_of_two)


def _triton_swiglu(gate, up, spec, power_of_two=True):
    from tilewright.ops.backends.triton import fused  # it imports triton

    return fused.swiglu_quantize(gate, up, spec, power_of_two)


def _cpu_norm(x, weight_D, eps, spec, power_of_two=True):
    """Not fused: on a CPU the norm is compiled with its neighbours, and its result is read from the cache."""
    return _cpu_copies(rms_norm(x, weight_D, eps), spec, power_of_two)


def _cpu_swiglu(gate, up, spec, power_of_two=True):
    return _cpu_copies(math.swiglu(gate, up), spec, power_of_two)


def _cpu_copies(y, spec, power_of_two):
    from tilewright.ops.backends.cpu import fp8  # it registers torch operators

    return y, *fp8.quantize_both(y.reshape(-1, y.shape[-1]), spec, power_of_two)


RMS_NORM_QUANTIZE = Op(
    "rms_norm_quantize",
    (
        Candidate("triton", _triton_norm, needs_triton),
        Candidate("cpu", _cpu_norm, FP8.why_not),
        Candidate("ref", ref.rms_norm_quantize, always),
    ),
    setting="quantize",
)
SWIGLU_QUANTIZE = Op(
    "swiglu_quantize",
    (
        Candidate("triton", _triton_swiglu, needs_triton),
        Candidate("cpu", _cpu_swiglu, FP8.why_not),
        Candidate("ref", ref.swiglu_quantize, always),
    ),
    setting="quantize",
)
