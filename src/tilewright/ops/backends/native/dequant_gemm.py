"""8-bit operands decoded to BF16, then torch's ordinary BF16 matmul: the same operand bits on any device.

A code times a power of two is exact in BF16, so only the order of the sum and the rounding of the result differ from an
8-bit unit. With other scales, or where the CPU has no BF16 instructions, operands are decoded to FP32 instead. That
depends on the scales' values, so the matmul is one operator to torch.compile, which does not look inside.

An FP32 result is not rounded on CUDA. On CPU torch 2.13 has no BF16 matmul with an FP32 result (`torch.mm(out_dtype=)`
is CUDA's alone), so it is the matmul rounded to BF16, in FP32: what a BF16 layer's weight gradient is, too.

Legend: M, N rows  K columns.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.core.hardware import cpu_features, cpu_multiplies
from tilewright.formats.scaling import Tile
from tilewright.formats.spec import FP8_SPECS, FloatSpec
from tilewright.formats.tiled import TiledTensor

_FP32_MANTISSA, _FP32_EXPONENT = 0x007FFFFF, 0x7F800000
_AMX_COLUMNS = 32


def dequant(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply two quantised matrices after decoding them: see `ops.gemm`."""
    return _matmul(
        a.qdata, a.scale_inv, [a.tile.rows, a.tile.cols], a.spec.name,
        b.qdata, b.scale_inv, [b.tile.rows, b.tile.cols], b.spec.name,
        bias_N, out_dtype,
    )  # fmt: skip


def decoded_matmul(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply decoded operands: a @ b.T + bias, summed in FP32, both BF16 or both FP32, autocast off."""
    with torch.autocast(a_MK.device.type, enabled=False):
        return _decoded_matmul(a_MK, b_NK, bias_N, out_dtype)


def _decoded_matmul(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    bias = None if bias_N is None else bias_N.to(out_dtype)
    if not a_MK.is_cuda and a_MK.dtype == torch.bfloat16 and a_MK.shape[1] % _AMX_COLUMNS and _has_tiles():
        # oneDNN's AMX kernel reads past the end of such a row and multiplies what it finds by zero: NaN at the head of
        # the next row spread to this one.
        a_MK, b_NK = (F.pad(operand, (0, -a_MK.shape[1] % _AMX_COLUMNS)) for operand in (a_MK, b_NK))
    if a_MK.dtype == out_dtype:
        return F.linear(a_MK, b_NK, bias)
    if a_MK.is_cuda and a_MK.dtype == torch.bfloat16:
        out_MN = torch.mm(a_MK, b_NK.T, out_dtype=torch.float32)
    else:
        out_MN = F.linear(a_MK, b_NK).to(torch.float32)
    return (out_MN if bias is None else out_MN + bias.to(torch.float32)).to(out_dtype)


@torch.library.custom_op("tilewright::wide_matmul", mutates_args=())
def wide_matmul(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """GEMM of dequantised operands in FP32, `decoded_matmul`: by the BF16 unit where that loses nothing, as of MXFP8
    and MXFP4."""
    rounds_once = out_dtype == torch.bfloat16 or a_MK.is_cuda
    if rounds_once and is_fast_bf16(a_MK.device) and fits_bf16(a_MK) and fits_bf16(b_NK):
        a_MK, b_NK = a_MK.to(torch.bfloat16), b_NK.to(torch.bfloat16)
    return decoded_matmul(a_MK, b_NK, bias_N, out_dtype)


@wide_matmul.register_fake
def _(a_MK, b_NK, bias_N, out_dtype):
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=out_dtype)


def fits_bf16(x: Tensor) -> bool:
    """True if dequantised values fit BF16: all of these FP32 numbers are zero, infinite, NaN or normal numbers of it;
    waits for the device.

    Example:
        >>> fits_bf16(torch.tensor([0.0, 1.75, -(2.0**-126)])), fits_bf16(torch.tensor([2.0**-127]))
        (True, False)
    """
    bits = x.contiguous().view(torch.int32)
    subnormal = ((bits & _FP32_EXPONENT) == 0) & ((bits & _FP32_MANTISSA) != 0)
    return not bool((((bits & 0xFFFF) != 0) | subnormal).any())


def is_fast_bf16(device: torch.device) -> bool:
    """True if GEMMs of dequantised BF16 are fast: on this device they run on a unit for them."""
    return device.type != "cpu" or _cpu_multiplies_bf16()


@functools.cache
def _cpu_multiplies_bf16() -> bool:
    features = cpu_features()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and cpu_multiplies(torch.bfloat16, features)


@functools.cache
def _has_tiles() -> bool:
    return "amx_bf16" in cpu_features()


def is_power_of_two(scale: Tensor) -> bool:
    """True if scales to dequantise by are powers of two, all of these positive FP32 numbers; waits for the device."""
    return not bool((scale.view(torch.int32) & _FP32_MANTISSA).any())


def tiled_of(qdata: Tensor, scale_inv: Tensor, tile: list[int], spec: FloatSpec) -> TiledTensor:
    """A TiledTensor to dequantise from what an operator of torch can take."""
    return TiledTensor(qdata, scale_inv, Tile(tile[0], tile[1]), spec)


@torch.library.custom_op("tilewright::dequant_gemm", mutates_args=())
def _matmul(
    a_qdata: Tensor, a_scale: Tensor, a_tile: list[int], a_spec: str,
    b_qdata: Tensor, b_scale: Tensor, b_tile: list[int], b_spec: str,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    a = tiled_of(a_qdata, a_scale, a_tile, FP8_SPECS[a_spec])
    b = tiled_of(b_qdata, b_scale, b_tile, FP8_SPECS[b_spec])
    exact = is_fast_bf16(a_qdata.device) and is_power_of_two(a_scale) and is_power_of_two(b_scale)
    dtype = torch.bfloat16 if exact else torch.float32
    return decoded_matmul(a.dequantize(dtype), b.dequantize(dtype), bias, out_dtype)


@_matmul.register_fake
def _(a_qdata, a_scale, a_tile, a_spec, b_qdata, b_scale, b_tile, b_spec, bias, out_dtype):
    return a_qdata.new_empty((a_qdata.shape[0], b_qdata.shape[0]), dtype=out_dtype)
