"""8-bit tiles on CPUs by a library in C++: the bits of `formats`, at the speed of memory.

What it quantises to: scales that are powers of two, rounding to nearest, tiles of 1x128, 128x1 or 128x128.

A matrix whose columns are contiguous is encoded as its transpose, and the result turned: no copy. The operators are
registered with torch when this module is imported, which a candidate does at its first use.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.formats.scaling import COLUMN_TILE, ROW_TILE, Tile
from tilewright.formats.spec import E5M2, FP8_SPECS, FloatSpec
from tilewright.formats.tiled import TiledTensor
from tilewright.ops.backends.cpu.addresses import address
from tilewright.ops.backends.cpu.build import FP8
from tilewright.ops.backends.native.dequant_gemm import decoded_matmul, is_fast_bf16, tiled_of

_KINDS = {(1, 128): 0, (128, 1): 1, (128, 128): 2}
"""Rows and columns of a tile -> what the library calls it."""
_BOTH = 3


def quantize(x_MK: Tensor, spec: FloatSpec, tile: Tile) -> TiledTensor:
    """Quantise a matrix to FP8 on a CPU in C++: see `ops.quantize`."""
    if _is_turned(x_MK):
        return quantize(x_MK.T, spec, tile.transposed()).transposed()
    qdata, scale_inv = _encode(x_MK, tile.rows, tile.cols, spec.name)
    return TiledTensor(qdata, scale_inv, tile, spec)


def quantize_both(x_MK: Tensor, spec: FloatSpec) -> tuple[TiledTensor, TiledTensor]:
    """Quantise a matrix to FP8 by rows and by columns on a CPU in C++: see `ops.quantize`."""
    if _is_turned(x_MK):
        row, column = quantize_both(x_MK.T, spec)
        return column, row
    qdata, scale_inv, columnwise_qdata, column_scale_inv = _encode_both(x_MK, spec.name)
    column = TiledTensor(columnwise_qdata, column_scale_inv, COLUMN_TILE, spec)
    return TiledTensor(qdata, scale_inv, ROW_TILE, spec), column.transposed()


def tile_gemm(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply two quantised FP8 matrices on a CPU in C++: see `ops.gemm`. It is `ops.backends.native.dequant_gemm`
    with a faster decoder."""
    return _matmul(
        a.qdata, a.scale_inv, [a.tile.rows, a.tile.cols], a.spec.name,
        b.qdata, b.scale_inv, [b.tile.rows, b.tile.cols], b.spec.name,
        bias_N, out_dtype,
    )  # fmt: skip


def decode_bf16(tiled: TiledTensor, *, turn: bool = False) -> Tensor:
    """Decode FP8 to BF16 on a CPU in C++. Scales as `is_exact` admits them.

    Args:
        tiled: the matrix.
        turn: contiguous rows, also where the codes have contiguous columns (and tiles 128 wide); else the codes' order.
    """
    qdata, tile = tiled.qdata, tiled.tile
    turned = _is_turned(qdata)
    if turned and not (turn and tile.cols == ROW_TILE.cols):
        return decode_bf16(tiled.transposed()).T
    qdata = qdata if turned else _row_major(qdata)
    rows, cols = qdata.shape
    out = torch.empty((rows, cols), dtype=torch.bfloat16)
    scale, (tile_rows, tile_cols) = tiled.scale_inv, tile.sizes(tiled.shape)
    FP8.functions.tw_decode(
        tiled.spec == E5M2, turned, address(qdata), rows, cols, qdata.stride(1 if turned else 0),
        address(scale), scale.stride(0), scale.stride(1), tile_rows, tile_cols,
        address(out), torch.get_num_threads(),
    )  # fmt: skip
    return out


def is_exact(tiled: TiledTensor) -> bool:
    """True if FP8 decodes exactly on a CPU: all scales are powers of two under which every code is a normal BF16
    number."""
    scale = tiled.scale_inv
    sizes = (scale.shape[0], scale.shape[1], scale.stride(0), scale.stride(1))
    return bool(FP8.functions.tw_is_exact(tiled.spec == E5M2, address(scale), *sizes))


def _is_turned(x: Tensor) -> bool:
    """True if an FP8 matrix is turned: columns are contiguous and rows are not."""
    return x.stride(1) != 1 and x.stride(0) == 1


def _row_major(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _run_encoder(kind: int, x: Tensor, spec: str, outputs: Sequence[Tensor | None]) -> None:
    x = _row_major(x if x.dtype == torch.bfloat16 else x.to(torch.float32))
    FP8.functions.tw_encode(
        kind, x.dtype == torch.float32, FP8_SPECS[spec] == E5M2, address(x), x.shape[0], x.shape[1], x.stride(0),
        *(address(output) for output in outputs), torch.get_num_threads(),
    )  # fmt: skip


def _outputs(x: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1])
    return x.new_empty(shape, dtype=torch.uint8), x.new_empty(tile.grid(shape), dtype=torch.float32)


@torch.library.custom_op("tilewright::cpu_encode", mutates_args=())
def _encode(x: Tensor, tile_rows: int, tile_cols: int, spec: str) -> tuple[Tensor, Tensor]:
    tile = Tile(tile_rows, tile_cols)
    qdata, scale_inv = _outputs(x, tile)
    columns = [None, None, qdata, scale_inv]
    _run_encoder(
        _KINDS[tile_rows, tile_cols], x, spec, columns if tile == COLUMN_TILE else [qdata, scale_inv, None, None]
    )
    return qdata, scale_inv


@_encode.register_fake
def _(x, tile_rows, tile_cols, spec):
    return _outputs(x, Tile(tile_rows, tile_cols))


@torch.library.custom_op("tilewright::cpu_encode_both", mutates_args=())
def _encode_both(x: Tensor, spec: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = *_outputs(x, ROW_TILE), *_outputs(x, COLUMN_TILE)
    _run_encoder(_BOTH, x, spec, outputs)
    return outputs


@_encode_both.register_fake
def _(x, spec):
    return *_outputs(x, ROW_TILE), *_outputs(x, COLUMN_TILE)


@torch.library.custom_op("tilewright::cpu_tile_gemm", mutates_args=())
def _matmul(
    a_qdata: Tensor, a_scale: Tensor, a_tile: list[int], a_spec: str,
    b_qdata: Tensor, b_scale: Tensor, b_tile: list[int], b_spec: str,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    a = tiled_of(a_qdata, a_scale, a_tile, FP8_SPECS[a_spec])
    b = tiled_of(b_qdata, b_scale, b_tile, FP8_SPECS[b_spec])
    if not (is_exact(a) and is_exact(b)):
        return decoded_matmul(a.dequantize(), b.dequantize(), bias, out_dtype)
    if is_fast_bf16(a_qdata.device):
        # Matmuls with a transposed left operand took twice the time on AMX (docs/log.md, 2026-11-20), so it is turned
        # while decoding; without AMX that costs what it saves.
        return decoded_matmul(decode_bf16(a, turn=True), decode_bf16(b), bias, out_dtype)
    return decoded_matmul(decode_bf16(a).float(), decode_bf16(b).float(), bias, out_dtype)


@_matmul.register_fake
def _(a_qdata, a_scale, a_tile, a_spec, b_qdata, b_scale, b_tile, b_spec, bias, out_dtype):
    return a_qdata.new_empty((a_qdata.shape[0], b_qdata.shape[0]), dtype=out_dtype)
