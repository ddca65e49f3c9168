"""tile_gemm: out_MN = a_MK @ b_NK.T + bias_N of quantised operands, summed in FP32. No autograd.

tile_gemm(a: TiledTensor [M, K], b: TiledTensor [N, K], bias_N, out_dtype) -> [M, N] out_dtype.
A linear layer's matmuls are all of this form: forward (x, weight), input gradient (dy, weight transposed), weight
gradient (dy transposed, x transposed).
Any sizes, also M = 0. The bias is rounded to out_dtype. The case's dtype is out_dtype. Its kind is "tiles" (E4M3 or
E5M2 with FP32 scales, a in tiles of 1x128 and b in 1x128 or 128x128), "tensorwise" (the same with one scale each),
"e5m2" (either, with both operands in E5M2) or "decoded": all other formats, which no kernel of ours multiplies as they
are.
torch's own 8-bit matmuls on CPU are no candidate: they ran at 0.01 GFLOP/s (torch 2.13).
"""

from torch import Tensor

from tilewright.formats.spec import E5M2, FloatSpec
from tilewright.formats.tiled import OperandFormat, TiledTensor
from tilewright.ops.backends.cpu.build import FP8
from tilewright.ops.backends.native.scaled_mm_availability import needs_scaled_mm
from tilewright.ops.backends.ref import fp8 as ref
from tilewright.ops.backends.triton.availability import needs_triton
from tilewright.ops.base.dispatch import Candidate, Knows, Op, always

KINDS = ("tiles", "tensorwise", "e5m2", "decoded")
_KNOWN = Knows(KINDS[:3], "codes in E4M3 and E5M2 with FP32 scales per 1x128, 128x128 or tensor")
_CUBLAS = Knows(KINDS[:2], f"{_KNOWN.what}, and no two operands in E5M2")
UNITS = ("scaled_mm", "triton")
"""Candidates that multiply 8-bit operands as they are, where the machine has a unit for it; the others decode them."""


def kind_of(a: TiledTensor | OperandFormat, b: TiledTensor | OperandFormat) -> str:
    """The GEMM's kind of case for these operands."""
    if not (a.is_fp8 and b.is_fp8):
        return "decoded"
    tiles = (a.tile.rows, a.tile.cols, b.tile.rows, b.tile.cols)
    kind = {(0, 0, 0, 0): "tensorwise", (1, 128, 1, 128): "tiles", (1, 128, 128, 128): "tiles"}.get(tiles, "decoded")
    both_e5m2 = E5M2 == _element(a) == _element(b)
    return "e5m2" if both_e5m2 and kind != "decoded" else kind


def _element(operand: TiledTensor | OperandFormat) -> FloatSpec:
    return operand.spec if isinstance(operand, TiledTensor) else operand.element


def _cpu(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype) -> Tensor:
    _KNOWN.check(kind_of(a, b))
    from tilewright.ops.backends.cpu import fp8  # it registers torch operators

    return fp8.tile_gemm(a, b, bias_N, out_dtype)


def _dequant(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype) -> Tensor:
    from tilewright.ops.backends.native import dequant_gemm  # it registers a torch operator

    if kind_of(a, b) == "decoded":
        return dequant_gemm.wide_matmul(a.dequantize(), b.dequantize(), bias_N, out_dtype)
    return dequant_gemm.dequant(a, b, bias_N, out_dtype)


def _scaled_mm(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype) -> Tensor:
    _KNOWN.check(kind_of(a, b))
    from tilewright.ops.backends.native import scaled_mm  # it registers a torch operator

    return scaled_mm.tile_gemm(a, b, bias_N, out_dtype)


def _triton(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype) -> Tensor:
    _KNOWN.check(kind_of(a, b))
    from tilewright.ops.backends.triton import gemm  # it imports triton

    return gemm.tile_gemm(a, b, bias_N, out_dtype)


TILE_GEMM = Op(
    "tile_gemm",
    (
        Candidate("cpu", _cpu, _KNOWN.why_not(FP8.why_not)),
        Candidate("scaled_mm", _scaled_mm, _CUBLAS.why_not(needs_scaled_mm)),
        Candidate("triton", _triton, _KNOWN.why_not(needs_triton)),
        Candidate("dequant", _dequant, always),
        Candidate("ref", ref.tile_gemm, always),
    ),
    kinds=KINDS,
)
