"""quantize, quantize_both: a matrix to 8-bit codes with a scale per tile. No autograd.

quantize(x_MK, spec, tile, power_of_two=True, noise=None) -> TiledTensor [M, K].
quantize_both(x_MK, spec, power_of_two=True) -> (row, column), from one read of x: `row` is x in tiles of 1x128, and
`column` is x transposed in tiles of 1x128 along the tokens, a TiledTensor [K, M]; on CPU its codes are a transposed
view. `formats.quantize` is the definition: codes and scales of every candidate are equal to its, bit for bit.
x is FP32, BF16 or FP16. The case's dtype is x's.
"""

from tilewright.formats.tiled import TiledTensor
from tilewright.ops.backends.cpu.build import FP8
from tilewright.ops.backends.ref import fp8 as ref
from tilewright.ops.backends.triton.availability import needs_triton
from tilewright.ops.base.dispatch import Candidate, Op, always


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
