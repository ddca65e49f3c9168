"""RMSNorm and SwiGLU that hand over 8-bit copies of their result, made while it is in registers. Forward only.

Bytes an element in BF16, against the operation and `quantize_both` one after the other: SwiGLU 4 read and 4 written,
not 6 and 4. RMSNorm 2 read and 4 written beside its row statistics, not 4 and 4; those are torch operations on purpose,
so that torch.compile puts them into the loop that makes x (a residual addition), which has the row at hand.

Legend: N tokens  D features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats.scaling import ROW_TILE
from tilewright.formats.spec import FP8_SPECS, FloatSpec
from tilewright.formats.tiled import TiledTensor
from tilewright.ops.backends.triton.encode import INF_BITS, MAGNITUDE, round_like, to_fp32
from tilewright.ops.backends.triton.launch import TILE, constants, has_fp8, num_tiles, raw, triton_op, wrap_triton
from tilewright.ops.backends.triton.quantize import scale_buffer, store_columns, store_rows

Copies = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""y [N, D], codes [N, D], scales, codes of the transpose [D, N], scales."""


def rms_norm_quantize(
    x: Tensor, weight_D: Tensor, eps: float, spec: FloatSpec, power_of_two: bool = True
) -> tuple[Tensor, TiledTensor, TiledTensor]:
    """Normalise by RMS and quantise the result in one Triton kernel: see `ops.quantize`."""
    return _tiled(norm_quantize(x.reshape(-1, x.shape[-1]), weight_D, eps, spec.name, power_of_two), x, spec)


def swiglu_quantize(
    gate: Tensor, up: Tensor, spec: FloatSpec, power_of_two: bool = True
) -> tuple[Tensor, TiledTensor, TiledTensor]:
    """Compute SwiGLU and quantise the result in one Triton kernel: see `ops.quantize`. gate, up [..., D] FP32, BF16 or
    FP16, of one dtype."""
    width = gate.shape[-1]
    copies = activation_quantize(gate.reshape(-1, width), up.reshape(-1, width), spec.name, power_of_two)
    return _tiled(copies, gate, spec)


def _tiled(copies: Copies, like: Tensor, spec: FloatSpec) -> tuple[Tensor, TiledTensor, TiledTensor]:
    y, row, row_scale, column, column_scale = copies
    row_tiles, column_tiles = (
        TiledTensor(qdata, scale, ROW_TILE, spec) for qdata, scale in ((row, row_scale), (column, column_scale))
    )
    return y.view(like.shape), row_tiles, column_tiles


def _outputs(x: Tensor) -> Copies:
    tokens, width = x.shape
    return (
        torch.empty((tokens, width), dtype=x.dtype, device=x.device),
        torch.empty((tokens, width), dtype=torch.uint8, device=x.device),
        scale_buffer(tokens, num_tiles(width), x),
        torch.empty((width, tokens), dtype=torch.uint8, device=x.device),
        scale_buffer(width, num_tiles(tokens), x),
    )


@triton_op("rms_norm_quantize")
def norm_quantize(
    x: Tensor, weight: Tensor, eps: float, spec: str, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Fused in Triton: `Copies` of the normalised rows of x [N, D]."""
    y, row, row_scale, column, column_scale = _outputs(x)
    tokens, width = x.shape
    if x.numel() == 0:
        return y, row, row_scale, column, column_scale
    x = x.contiguous()
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)  # no FP32 copy of x, as squares would make
    inverse = torch.rsqrt(norm * norm / width + eps)
    wrap_triton(_norm_kernel)[(triton.cdiv(tokens, TILE) * triton.cdiv(width, TILE),)](
        raw(x), inverse, weight.to(torch.float32).contiguous(), raw(y), row, row_scale, column, column_scale,
        tokens, width, POW2=power_of_two, FAST=has_fp8(x.device), **constants(FP8_SPECS[spec]), num_warps=8,
    )  # fmt: skip
    return y, row, row_scale, column, column_scale


@triton_op("swiglu_quantize")
def activation_quantize(
    gate: Tensor, up: Tensor, spec: str, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Fused in Triton: `Copies` of silu(gate) * up, both [N, D]."""
    y, row, row_scale, column, column_scale = _outputs(gate)
    tokens, width = gate.shape
    if gate.numel() == 0:
        return y, row, row_scale, column, column_scale
    wrap_triton(_swiglu_kernel)[(triton.cdiv(tokens, TILE) * triton.cdiv(width, TILE),)](
        raw(gate.contiguous()), raw(up.contiguous()), raw(y), row, row_scale, column, column_scale,
        tokens, width, POW2=power_of_two, FAST=has_fp8(gate.device), **constants(FP8_SPECS[spec]), num_warps=8,
    )  # fmt: skip
    return y, row, row_scale, column, column_scale


@triton.jit
def _norm_kernel(
    x_ptr, inverse_ptr, weight_ptr, y_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, num_rows, num_cols,
    POW2: tl.constexpr, FAST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    grid_cols = (num_cols + 127) // 128
    block_row, block_col = tl.program_id(0) // grid_cols, tl.program_id(0) % grid_cols
    cols = block_col * 128 + tl.arange(0, 128)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < num_cols, other=0.0)
    finite = tl.zeros((16, 128), tl.int32)
    largest = tl.zeros((16, 128), tl.int32)
    for start in tl.range(0, 128, 16):
        rows = block_row * 128 + start + tl.arange(0, 16)[:, None]
        inside = (rows < num_rows) & (cols < num_cols)
        offsets = rows.to(tl.int64) * num_cols + cols
        x = to_fp32(tl.load(x_ptr + offsets, mask=inside, other=0))
        inverse = tl.load(inverse_ptr + rows, mask=rows < num_rows, other=0.0)
        y, out = round_like(x * inverse * weight, x_ptr.dtype.element_ty)
        tl.store(y_ptr + offsets, out, mask=inside)
        store_rows(
            y, rows, cols, inside, block_col, row_ptr, row_scale_ptr, num_rows, num_cols,
            POW2, FAST, MANTISSA, BIAS, MAX_BITS, LEAST, MOST,
        )  # fmt: skip
        magnitude = y.to(tl.int32, bitcast=True) & MAGNITUDE
        largest = tl.maximum(largest, magnitude)
        finite = tl.maximum(finite, tl.where(magnitude < INF_BITS, magnitude, 0))
    tl.debug_barrier()  # y is read again, by other threads than wrote it
    store_columns(
        y_ptr, finite, largest, block_row, block_col, row_ptr, column_ptr, column_scale_ptr, num_rows, num_cols,
        16, POW2, FAST, MANTISSA, BIAS, MAX_BITS, LEAST, MOST,
    )  # fmt: skip


@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr, y_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, num_rows, num_cols,
    POW2: tl.constexpr, FAST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    grid_cols = (num_cols + 127) // 128
    block_row, block_col = tl.program_id(0) // grid_cols, tl.program_id(0) % grid_cols
    cols = block_col * 128 + tl.arange(0, 128)[None, :]
    finite = tl.zeros((16, 128), tl.int32)
    largest = tl.zeros((16, 128), tl.int32)
    for start in tl.range(0, 128, 16):
        rows = block_row * 128 + start + tl.arange(0, 16)[:, None]
        inside = (rows < num_rows) & (cols < num_cols)
        offsets = rows.to(tl.int64) * num_cols + cols
        gate = to_fp32(tl.load(gate_ptr + offsets, mask=inside, other=0))
        up = to_fp32(tl.load(up_ptr + offsets, mask=inside, other=0))
        y, out = round_like(gate / (1.0 + tl.exp(-gate)) * up, gate_ptr.dtype.element_ty)
        tl.store(y_ptr + offsets, out, mask=inside)
        store_rows(
            y, rows, cols, inside, block_col, row_ptr, row_scale_ptr, num_rows, num_cols,
            POW2, FAST, MANTISSA, BIAS, MAX_BITS, LEAST, MOST,
        )  # fmt: skip
        magnitude = y.to(tl.int32, bitcast=True) & MAGNITUDE
        largest = tl.maximum(largest, magnitude)
        finite = tl.maximum(finite, tl.where(magnitude < INF_BITS, magnitude, 0))
    tl.debug_barrier()  # y is read again, by other threads than wrote it
    store_columns(
        y_ptr, finite, largest, block_row, block_col, row_ptr, column_ptr, column_scale_ptr, num_rows, num_cols,
        16, POW2, FAST, MANTISSA, BIAS, MAX_BITS, LEAST, MOST,
    )  # fmt: skip
