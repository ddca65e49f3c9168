"""Quantisation to 8-bit tiles on GPUs: the bits of `formats.quantize`, each input element read once.

`quantize` makes codes of x; `quantize_both` also those of the transposed matrix, from the same read. Every program
takes 128 x 128 elements (64 x 128 for row tiles), so ragged edges are masks and no input is padded.
Scales are stored with rows next to each other ([M, GK] with strides (1, M)), which is how matrix units want them.

Legend: M rows  K columns; grid [GM, GK] = tiles down and across.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats.scaling import ROW_TILE, Tile, scale_inv_of, tile_amax
from tilewright.formats.spec import FP8_SPECS, FloatSpec
from tilewright.formats.tiled import TiledTensor
from tilewright.ops.backends.triton.encode import (
    INF_BITS,
    MAGNITUDE,
    encode_bits,
    encode_tile,
    mark_not_finite,
    scales_of,
    to_fp32,
    to_qdata,
)
from tilewright.ops.backends.triton.launch import TILE, constants, has_fp8, num_tiles, raw, triton_op, wrap_triton

ROWS, COLUMNS, BLOCKS = 1, 0, 2
"""Which way a tile runs: values of `encode_tile`'s AXES."""


def quantize(
    x_MK: Tensor, spec: FloatSpec, tile: Tile, power_of_two: bool = True, noise: Tensor | None = None
) -> TiledTensor:
    """Quantise a matrix in Triton: see `formats.quantize.quantize`. Codes are contiguous whatever x's strides are: a
    transposed view is read as it lies, and its codes are stored turned; only other strides cost a copy of x.

    Tiles other than 1x128, 128x1 and 128x128 take their scales from torch operations: two reads of x.

    Args:
        x_MK: [M, K] FP32, BF16 or FP16 on a CUDA device (any device in the interpreter).
        spec: E4M3 or E5M2.
        tile: which elements share a scale.
        power_of_two: scales are powers of two.
        noise: int32 [M, K] for stochastic rounding.
    """
    axes = _axes(tile.rows, tile.cols)
    if axes is not None:
        qdata, scale_inv = quantize_tiles(x_MK, spec.name, axes, power_of_two, noise)
    else:
        scale_inv = scale_inv_of(tile_amax(x_MK, tile), spec, power_of_two=power_of_two)
        rows, cols = tile.sizes((x_MK.shape[0], x_MK.shape[1]))
        qdata = quantize_with_scales(x_MK, scale_inv, spec.name, rows, cols, power_of_two, noise)
    return TiledTensor(qdata, scale_inv, tile, spec)


def quantize_both(x_MK: Tensor, spec: FloatSpec, power_of_two: bool = True) -> tuple[TiledTensor, TiledTensor]:
    """Quantise both in Triton: rows of x in 1x128 tiles, and rows of its transpose in 1x128 tiles, from one read of x.

    Args:
        x_MK: [M, K] FP32, BF16 or FP16.
        spec: E4M3 or E5M2.
        power_of_two: scales are powers of two.

    Returns:
        (row [M, K], column [K, M]), codes of both contiguous.
    """
    row, row_scale, column, column_scale = quantize_rows_and_columns(x_MK, spec.name, power_of_two)
    return TiledTensor(row, row_scale, ROW_TILE, spec), TiledTensor(column, column_scale, ROW_TILE, spec)


def _axes(rows: int, cols: int) -> int | None:
    """Axes of tiles for Triton's quantising, by integers: torch.compile does not trace a look-up by tile."""
    if (rows, cols) == (1, TILE):
        return ROWS
    if (rows, cols) == (TILE, 1):
        return COLUMNS
    return BLOCKS if (rows, cols) == (TILE, TILE) else None


def _as_it_lies(x: Tensor) -> tuple[Tensor, bool]:
    """Return x or its transpose, whichever is contiguous by rows, and whether it is the transpose; else a copy of x."""
    turned = x.T.is_contiguous() and not x.is_contiguous()
    return (x.T if turned else x.contiguous()), turned


def scale_buffer(rows: int, tiles: int, like: Tensor) -> Tensor:
    """Make a buffer of scales for quantising in Triton: FP32 [rows, tiles] with strides (1, rows), uninitialised."""
    return torch.empty(tiles, rows, dtype=torch.float32, device=like.device).T


@triton_op("quantize_tiles")
def quantize_tiles(x: Tensor, spec: str, axes: int, power_of_two: bool, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantise tiles in Triton: codes [M, K] and scales of tiles that run along `axes`."""
    num_rows, num_cols = x.shape
    qdata = torch.empty((num_rows, num_cols), dtype=torch.uint8, device=x.device)
    grid_rows, grid_cols = num_tiles(num_rows), num_tiles(num_cols)
    if axes == ROWS:
        scale_inv = scale_buffer(num_rows, grid_cols, x)
    else:
        scale_inv = scale_buffer(grid_rows, num_cols if axes == COLUMNS else grid_cols, x)
    if x.numel() == 0:
        return qdata, scale_inv
    x, turned = _as_it_lies(x)
    codes, scales = (qdata.T, scale_inv.T) if turned else (qdata, scale_inv)
    along = 1 - axes if turned and axes != BLOCKS else axes  # rows of x are columns of its transpose
    block_m = 64 if along == ROWS else TILE
    wrap_triton(_tiles_kernel)[(triton.cdiv(x.shape[0], block_m) * triton.cdiv(x.shape[1], TILE),)](
        raw(x), qdata, scale_inv, raw(x) if noise is None else noise.contiguous(),
        *x.shape, *codes.stride(), *scales.stride(),
        BLOCK_M=block_m, AXES=along, TURNED=turned, POW2=power_of_two, NOISY=noise is not None, FAST=has_fp8(x.device),
        **constants(FP8_SPECS[spec]), num_warps=8 if along == ROWS else 16,
    )  # fmt: skip
    return qdata, scale_inv


@triton_op("quantize_rows_and_columns")
def quantize_rows_and_columns(x: Tensor, spec: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise rows and columns in Triton: (codes [M, K], scales [M, GK], codes of the transpose [K, M], scales [K,
    GM])."""
    num_rows, num_cols = x.shape
    grid_rows, grid_cols = num_tiles(num_rows), num_tiles(num_cols)
    row = torch.empty((num_rows, num_cols), dtype=torch.uint8, device=x.device)
    column = torch.empty((num_cols, num_rows), dtype=torch.uint8, device=x.device)
    row_scale = scale_buffer(num_rows, grid_cols, x)
    column_scale = scale_buffer(num_cols, grid_rows, x)
    if x.numel() == 0:
        return row, row_scale, column, column_scale
    x = raw(x.contiguous())
    wrap_triton(_both_kernel)[(grid_rows * grid_cols,)](
        x, row, row_scale, column, column_scale, num_rows, num_cols,
        POW2=power_of_two, FAST=has_fp8(x.device), **constants(FP8_SPECS[spec]), num_warps=8,
    )  # fmt: skip
    return row, row_scale, column, column_scale


@triton_op("quantize_with_scales")
def quantize_with_scales(
    x: Tensor, scale_inv: Tensor, spec: str, rows: int, cols: int, power_of_two: bool, noise: Tensor | None
) -> Tensor:
    """Quantise with scales in Triton: codes [M, K] under given ones, one for each `rows` x `cols` elements."""
    num_rows, num_cols = x.shape
    qdata = torch.empty((num_rows, num_cols), dtype=torch.uint8, device=x.device)
    if x.numel() == 0:
        return qdata
    x, turned = _as_it_lies(x)
    codes, scales, tile = (qdata.T, scale_inv.T, (cols, rows)) if turned else (qdata, scale_inv, (rows, cols))
    wrap_triton(_scaled_kernel)[(triton.cdiv(x.shape[0], 64) * triton.cdiv(x.shape[1], TILE),)](
        raw(x), qdata, scale_inv, raw(x) if noise is None else noise.contiguous(),
        *x.shape, *tile, *codes.stride(), *scales.stride(),
        BLOCK_M=64, TURNED=turned, POW2=power_of_two, NOISY=noise is not None, FAST=has_fp8(x.device),
        **constants(FP8_SPECS[spec]), num_warps=8,
    )  # fmt: skip
    return qdata


# ---- kernels; programs next to each other take blocks next to each other in a row ----


@triton.jit
def _tiles_kernel(
    x_ptr, codes_ptr, scale_ptr, noise_ptr, num_rows, num_cols, code_stride_row, code_stride_col,
    scale_stride_row, scale_stride_col,
    BLOCK_M: tl.constexpr, AXES: tl.constexpr, TURNED: tl.constexpr,
    POW2: tl.constexpr, NOISY: tl.constexpr, FAST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    grid_cols = (num_cols + 127) // 128
    block_row, block_col = tl.program_id(0) // grid_cols, tl.program_id(0) % grid_cols
    rows = block_row * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = block_col * 128 + tl.arange(0, 128)[None, :]
    inside = (rows < num_rows) & (cols < num_cols)
    x = to_fp32(tl.load(x_ptr + rows.to(tl.int64) * num_cols + cols, mask=inside, other=0))
    code_at = rows.to(tl.int64) * code_stride_row + cols.to(tl.int64) * code_stride_col
    noise = tl.load(noise_ptr + code_at, mask=inside, other=0) if NOISY else 0
    qdata, scale_inv, spoilt = encode_tile(
        x, noise, AXES, MANTISSA, BIAS, MAX_BITS, LEAST, MOST, POW2, NOISY, FAST
    )  # fmt: skip
    store_codes(
        codes_ptr, qdata, block_row * BLOCK_M, block_col * 128, num_rows, num_cols, code_stride_row, code_stride_col,
        BLOCK_M, TURNED,
    )  # fmt: skip
    if spoilt:
        mark_not_finite(
            x_ptr, codes_ptr, block_row * BLOCK_M, block_col * 128, num_rows, num_cols, code_stride_row,
            code_stride_col, BLOCK_M,
        )  # fmt: skip
    if AXES == 1:
        tl.store(scale_ptr + rows * scale_stride_row + block_col.to(tl.int64) * scale_stride_col, scale_inv,
                 mask=rows < num_rows)  # fmt: skip
    elif AXES == 0:
        tl.store(scale_ptr + block_row * scale_stride_row + cols.to(tl.int64) * scale_stride_col, scale_inv,
                 mask=cols < num_cols)  # fmt: skip
    else:
        one = tl.zeros((1, 1), tl.int32)
        tl.store(scale_ptr + one + block_row * scale_stride_row + block_col.to(tl.int64) * scale_stride_col, scale_inv)


@triton.jit
def store_codes(
    codes_ptr, qdata, first_row, first_col, num_rows, num_cols, code_stride_row, code_stride_col,
    BLOCK_M: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Store a block of BLOCK_M x 128 quantised codes in Triton. TURNED: rows are next to each other in memory, so the
    block is transposed before."""
    if TURNED:
        rows = first_row + tl.arange(0, BLOCK_M)[None, :]
        cols = first_col + tl.arange(0, 128)[:, None]
        at = rows.to(tl.int64) * code_stride_row + cols.to(tl.int64) * code_stride_col
        tl.store(codes_ptr + at, tl.trans(qdata), mask=(rows < num_rows) & (cols < num_cols))
    else:
        rows = first_row + tl.arange(0, BLOCK_M)[:, None]
        cols = first_col + tl.arange(0, 128)[None, :]
        at = rows.to(tl.int64) * code_stride_row + cols.to(tl.int64) * code_stride_col
        tl.store(codes_ptr + at, qdata, mask=(rows < num_rows) & (cols < num_cols))


@triton.jit
def _both_kernel(
    x_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, num_rows, num_cols,
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
        x = to_fp32(tl.load(x_ptr + rows.to(tl.int64) * num_cols + cols, mask=inside, other=0))
        store_rows(
            x, rows, cols, inside, block_col, row_ptr, row_scale_ptr, num_rows, num_cols,
            POW2, FAST, MANTISSA, BIAS, MAX_BITS, LEAST, MOST,
        )  # fmt: skip
        magnitude = x.to(tl.int32, bitcast=True) & MAGNITUDE
        largest = tl.maximum(largest, magnitude)
        finite = tl.maximum(finite, tl.where(magnitude < INF_BITS, magnitude, 0))
    store_columns(
        x_ptr, finite, largest, block_row, block_col, row_ptr, column_ptr, column_scale_ptr, num_rows, num_cols,
        32, POW2, FAST, MANTISSA, BIAS, MAX_BITS, LEAST, MOST,
    )  # fmt: skip


@triton.jit
def store_rows(
    x, rows, cols, inside, block_col, row_ptr, row_scale_ptr, num_rows, num_cols,
    POW2: tl.constexpr, FAST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Quantise and store rows in Triton, 128 columns wide, in 1x128 tiles. `store_columns` mends what is not finite."""
    qdata, scale_inv, _ = encode_tile(  # pyright: ignore[reportGeneralTypeIssues]  # to Python its body never returns
        x, 0, 1, MANTISSA, BIAS, MAX_BITS, LEAST, MOST, POW2, False, FAST
    )  # fmt: skip
    tl.store(row_ptr + rows.to(tl.int64) * num_cols + cols, qdata, mask=inside)
    tl.store(row_scale_ptr + block_col.to(tl.int64) * num_rows + rows, scale_inv, mask=rows < num_rows)


@triton.jit
def store_columns(
    x_ptr, finite, largest, block_row, block_col, row_ptr, column_ptr, column_scale_ptr, num_rows, num_cols,
    STEP: tl.constexpr, POW2: tl.constexpr, FAST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Quantise and store columns in Triton of a 128 x 128 block, transposed; then mend both copies.

    The block is read a second time, which the caches answer: holding it in registers instead leaves room for one
    program on a multiprocessor.

    Args:
        finite, largest: [16, 128] magnitude bits; the largest of each column is among the 16, with only finite ones
            looked at, and with all.
        STEP: rows at a time, and codes of a column that are stored next to each other. 32 fill a sector of memory; 16
            leave registers to callers that need more.
    """
    cols = block_col * 128 + tl.arange(0, 128)[None, :]
    amax = tl.max(finite, axis=0, keep_dims=True)
    scale_inv, scale = scales_of(amax, MAX_BITS, LEAST, MOST, POW2)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(column_scale_ptr + block_row.to(tl.int64) * num_cols + cols, scale_inv, mask=cols < num_cols)
    out_rows = block_col * 128 + tl.arange(0, 128)[:, None]
    for start in tl.range(0, 128, STEP):
        rows = block_row * 128 + start + tl.arange(0, STEP)[:, None]
        inside = (rows < num_rows) & (cols < num_cols)
        x = to_fp32(tl.load(x_ptr + rows.to(tl.int64) * num_cols + cols, mask=inside, other=0))
        if FAST:
            qdata = to_qdata(x * scale, MANTISSA)
        else:
            qdata = encode_bits(x, scale, 0, MANTISSA, BIAS, MAX_BITS, False)
        out_cols = block_row * 128 + start + tl.arange(0, STEP)[None, :]
        tl.store(column_ptr + out_rows.to(tl.int64) * num_rows + out_cols, tl.trans(qdata),
                 mask=(out_rows < num_cols) & (out_cols < num_rows))  # fmt: skip
    if FAST:
        spoilt = tl.max(tl.max(largest, axis=1), axis=0) >= INF_BITS
        if spoilt:
            mark_not_finite(x_ptr, row_ptr, block_row * 128, block_col * 128, num_rows, num_cols, num_cols, 1, 128)
            mark_not_finite(x_ptr, column_ptr, block_row * 128, block_col * 128, num_rows, num_cols, 1, num_rows, 128)


@triton.jit
def _scaled_kernel(
    x_ptr, codes_ptr, scale_ptr, noise_ptr, num_rows, num_cols, tile_rows, tile_cols, code_stride_row,
    code_stride_col, scale_stride_row, scale_stride_col,
    BLOCK_M: tl.constexpr, TURNED: tl.constexpr, POW2: tl.constexpr, NOISY: tl.constexpr, FAST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    grid_cols = (num_cols + 127) // 128
    block_row, block_col = tl.program_id(0) // grid_cols, tl.program_id(0) % grid_cols
    rows = block_row * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = block_col * 128 + tl.arange(0, 128)[None, :]
    inside = (rows < num_rows) & (cols < num_cols)
    x = to_fp32(tl.load(x_ptr + rows.to(tl.int64) * num_cols + cols, mask=inside, other=0))
    code_at = rows.to(tl.int64) * code_stride_row + cols.to(tl.int64) * code_stride_col
    noise = tl.load(noise_ptr + code_at, mask=inside, other=0) if NOISY else 0
    scale_at = (rows // tile_rows).to(tl.int64) * scale_stride_row + (cols // tile_cols).to(tl.int64) * scale_stride_col
    scale_inv = tl.load(scale_ptr + scale_at, mask=inside, other=1.0)
    if POW2:
        scale = ((254 << 23) - scale_inv.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(tl.full(scale_inv.shape, 1.0, tl.float32), scale_inv)
    if FAST and not NOISY:
        qdata = to_qdata(x * scale, MANTISSA)
    else:
        qdata = encode_bits(x, scale, noise, MANTISSA, BIAS, MAX_BITS, NOISY)
    store_codes(
        codes_ptr, qdata, block_row * BLOCK_M, block_col * 128, num_rows, num_cols, code_stride_row, code_stride_col,
        BLOCK_M, TURNED,
    )  # fmt: skip
    if FAST and not NOISY:
        largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1), axis=0)
        if largest >= INF_BITS:
            mark_not_finite(
                x_ptr, codes_ptr, block_row * BLOCK_M, block_col * 128, num_rows, num_cols, code_stride_row,
                code_stride_col, BLOCK_M,
            )  # fmt: skip
