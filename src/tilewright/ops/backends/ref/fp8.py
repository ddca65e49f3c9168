"""The reference for quantised operands, in plain torch: bits by `formats`, matmuls and sums in FP32.

Legend: M, N rows  K columns  D features.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.formats import quantize as formats
from tilewright.formats.scaling import ScaleSpec, Tile
from tilewright.formats.spec import FloatSpec
from tilewright.formats.tiled import OperandFormat, TiledTensor
from tilewright.ops.backends.ref import math

Both = tuple[TiledTensor, TiledTensor]
WithCopies = tuple[Tensor, TiledTensor, TiledTensor]


def quantize(x_MK: Tensor, form: OperandFormat, noise: Tensor | None = None) -> TiledTensor:
    """Quantise a matrix to FP8: the reference, see `ops.quantize`."""
    if torch.compiler.is_compiling() and not form.is_fp8:
        return _quantized(x_MK, form, noise)
    return formats.quantize(x_MK, form, noise)


def quantize_both(x_MK: Tensor, form: OperandFormat) -> Both:
    """Quantise a matrix to FP8 by rows and by columns: the reference, see `ops.quantize`."""
    return quantize(x_MK, form), quantize(x_MK.T, form)


def _quantized(x_MK: Tensor, form: OperandFormat, noise: Tensor | None) -> TiledTensor:
    """FP8 by the reference as one operator of `formats.quantize`: inductor (torch 2.13) fails on the ragged small tiles
    of other formats."""
    element, scale = form.element, form.scale
    sizes = [element.bits, element.exponent_bits, element.mantissa_bits, scale.tile.rows, scale.tile.cols]
    flags = [element.has_infinity, element.has_nan, scale.second]
    qdata, scale_inv, second = _quantize_op(
        x_MK, noise, element.name, sizes, flags, element.dtype, scale.dtype, scale.rule
    )  # fmt: skip
    return form.tensor(qdata, scale_inv, second if scale.second else None)


@torch.library.custom_op("tilewright::quantize", mutates_args=())
def _quantize_op(
    x: Tensor, noise: Tensor | None, name: str, sizes: list[int], flags: list[bool], dtype: torch.dtype,
    scale_dtype: torch.dtype, rule: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    bits, exponent_bits, mantissa_bits, rows, cols = sizes
    element = FloatSpec(name, bits, exponent_bits, mantissa_bits, dtype, *flags[:2])
    scale: Any = (Tile(rows, cols), scale_dtype, rule, flags[2])
    tiled = formats.quantize(x, OperandFormat(element, ScaleSpec(*scale)), noise)
    second = x.new_empty((0, 0), dtype=torch.float32) if tiled.second is None else tiled.second
    return tiled.qdata.contiguous(), tiled.scale_inv.contiguous(), second


@_quantize_op.register_fake
def _(x, noise, name, sizes, flags, dtype, scale_dtype, rule):
    shape = (x.shape[0], x.shape[1])
    qdata = x.new_empty(shape, dtype=torch.uint8)
    second = x.new_empty((1, 1) if flags[2] else (0, 0), dtype=torch.float32)
    return qdata, x.new_empty(Tile(*sizes[3:]).grid(shape), dtype=scale_dtype), second


def tile_gemm(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply two quantised FP8 matrices: the reference, see `ops.gemm`. FP32 operands: on a GPU, their matmul must
    not be allowed to use TF32."""
    out_MN = a.dequantize() @ b.dequantize().T
    if bias_N is not None:
        out_MN = out_MN + bias_N.to(out_dtype).to(torch.float32)
    return out_MN.to(out_dtype)


def rms_norm_quantize(x: Tensor, weight_D: Tensor, eps: float, form: OperandFormat) -> WithCopies:
    """Normalise by RMS and quantise the result to FP8: the reference, see `ops.quantize`."""
    y = math.rms_norm(x, weight_D, eps)
    return y, *quantize_both(y.reshape(-1, y.shape[-1]), form)


def swiglu_quantize(gate: Tensor, up: Tensor, form: OperandFormat) -> WithCopies:
    """Compute SwiGLU and quantise the result to FP8: the reference, see `ops.quantize`."""
    y = math.swiglu(gate, up)
    return y, *quantize_both(y.reshape(-1, y.shape[-1]), form)
