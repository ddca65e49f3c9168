"""tile_gemm: out_MN = a_MK @ b_NK.T + bias_N of 8-bit operands, summed in FP32. No autograd.

tile_gemm(a: TiledTensor [M, K], b: TiledTensor [N, K], bias_N, out_dtype) -> [M, N] out_dtype.
A linear layer's matmuls are all of this form: forward (x, weight), input gradient (dy, weight transposed), weight
gradient (dy transposed, x transposed).
a is in tiles of 1x128 and b in 1x128 or 128x128, or both have one scale; any sizes, also M = 0. The bias is rounded to
out_dtype. The case's dtype is out_dtype, its kind "tiles" or "tensorwise".
torch's own 8-bit matmuls on CPU are no candidate: they ran at 0.01 GFLOP/s (torch 2.13).
"""

from torch import Tensor

from tilewright.formats.scaling import TENSORWISE
from tilewright.formats.tiled import TiledTensor
from tilewright.ops.backends.cpu.build import FP8
from tilewright.ops.backends.native.scaled_mm_availability import needs_scaled_mm
from tilewright.ops.backends.ref import fp8 as ref
from tilewright.ops.backends.triton.availability import needs_triton
from tilewright.ops.base.dispatch import Candidate, Op, always

KINDS = ("tiles", "tensorwise")
UNITS = ("scaled_mm", "triton")
"""Candidates that multiply 8-bit operands as they are, where the machine has a unit for it; the others decode them."""


def kind_of(a: TiledTensor) -> str:
    """The case's kind for this first operand."""
    return "tensorwise" if a.tile == TENSORWISE else "tiles"


def _cpu(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype) -> Tensor:
    from tilewright.ops.backends.cpu import fp8  # it registers torch operators

    return fp8.tile_gemm(a, b, bias_N, out_dtype)


def _dequant(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype) -> Tensor:
    from tilewright.ops.backends.native import dequant_gemm  # it registers a torch operator

    return dequant_gemm.dequant(a, b, bias_N, out_dtype)


def _scaled_mm(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype) -> Tensor:
    from tilewright.ops.backends.native import scaled_mm  # it registers a torch operator

    return scaled_mm.tile_gemm(a, b, bias_N, out_dtype)


def _triton(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype) -> Tensor:
    from tilewright.ops.backends.triton import gemm  # it imports triton

    return gemm.tile_gemm(a, b, bias_N, out_dtype)


TILE_GEMM = Op(
    "tile_gemm",
    (
        Candidate("cpu", _cpu, FP8.why_not),
        Candidate("scaled_mm", _scaled_mm, needs_scaled_mm),
        Candidate("triton", _triton, needs_triton),
        Candidate("dequant", _dequant, always),
        Candidate("ref", ref.tile_gemm, always),
    ),
    kinds=KINDS,
)
