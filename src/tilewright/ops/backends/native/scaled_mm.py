"""a @ b.T of 8-bit operands by torch's `scaled_mm`: cuBLAS's kernels with scales by tile (Hopper) or by tensor.

What cuBLAS wants is not what we hold: `prepare` pads and lays out, and runs on any device, so that only the call itself
needs a GPU. Its rules, read in torch's ScaledBlas.cpp (torch 2.11 has the same messages):
- a row by row, b column by column (our codes of b, [N, K] row by row, seen transposed); K and N multiples of 16.
- Tiles of 1x128: decode scales [M, K/128] with strides (1, M); M a multiple of 4, so that each column of scales starts
  at 16 bytes. Tiles of 128x128: [K/128 rounded up to 4, N/128], the first dimension contiguous.
- Not both E5M2. A bias in BF16 or FP16 like the result, and none for FP32.
- K is padded to whole tiles here: no rule says so, but other libraries do it and zeros cost little.
Padding is exact: codes of zero, scales of one, and the result is cut.

Legend: M, N rows  K columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE, Tile
from tilewright.formats.spec import FP8_SPECS
from tilewright.formats.tiled import TiledTensor

_PAIRS = ((ROW_TILE, BLOCK_TILE), (ROW_TILE, ROW_TILE), (TENSORWISE, TENSORWISE))
_OUT = (torch.bfloat16, torch.float32)
"""What cuBLAS is asked for; FP16 results are rounded from FP32."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of `scaled_mm`, and the part of its result to keep."""

    mat_a: Tensor
    mat_b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    recipe_a: str
    recipe_b: str
    bias: Tensor | None
    out_dtype: torch.dtype
    rows: int
    cols: int


def tile_gemm(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """GEMM by `scaled_mm`: multiply two quantised matrices: see `ops.gemm`. cuBLAS does not multiply two E5M2
    operands."""
    tiles = [a.tile.rows, a.tile.cols, b.tile.rows, b.tile.cols]
    return _scaled_mm(a.qdata, b.qdata, a.scale_inv, b.scale_inv, bias_N, tiles, a.spec.name, b.spec.name, out_dtype)


# One operation for torch.compile, for two reasons: torch's shape function wants N to be a multiple of 128, which its
# kernels do not (seen in torch 2.13), and layouts are looked at in `prepare`, which tracing does not allow.
@torch.library.custom_op("tilewright::scaled_mm", mutates_args=())
def _scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, tiles: list[int], a_spec: str,
    b_spec: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    a_tiled = TiledTensor(a, a_scale, Tile(tiles[0], tiles[1]), FP8_SPECS[a_spec])
    b_tiled = TiledTensor(b, b_scale, Tile(tiles[2], tiles[3]), FP8_SPECS[b_spec])
    if (a_tiled.tile, b_tiled.tile) not in _PAIRS:
        raise AssertionError(
            f"no matmul of tiles {a_tiled.tile} and {b_tiled.tile}; tile_gemm's contract has the pairs"
        )
    return multiply(a_tiled, b_tiled, bias, out_dtype)


@_scaled_mm.register_fake
def _(a, b, a_scale, b_scale, bias, tiles, a_spec, b_spec, out_dtype):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def multiply(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The matmul by `scaled_mm` on the device."""
    if 0 in (*a.shape, b.shape[0]):
        out = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.qdata.device)
        return out if bias_N is None else out + bias_N.to(out_dtype)
    call = prepare(a, b, bias_N, out_dtype)
    out = F.scaled_mm(
        call.mat_a,
        call.mat_b,
        call.scale_a,
        getattr(F.ScalingType, call.recipe_a),
        call.scale_b,
        getattr(F.ScalingType, call.recipe_b),
        bias=call.bias,
        output_dtype=call.out_dtype,
        use_fast_accum=False,
    )
    return finish(out, call, bias_N, out_dtype)


def prepare(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Arguments:
    """The arguments of `scaled_mm`, padded and laid out. Nothing is copied where sizes and strides fit already.

    Args:
        a: [M, K] in tiles of 1x128, or with one scale.
        b: [N, K] in tiles of 1x128 or 128x128, or with one scale.
        bias_N: [N]; added afterwards where cuBLAS cannot (see `finish`).
        out_dtype: FP32, BF16 or FP16.
    """
    (rows, summed), cols = a.shape, b.shape[0]
    by_tile = a.tile != TENSORWISE
    more_rows = -rows % 4 if by_tile else 0
    more_cols, more_summed = -cols % 16, -summed % (128 if by_tile else 16)
    scale_b = _block_scale(b.scale_inv) if b.tile == BLOCK_TILE else _row_scale(b.scale_inv, more_cols)
    bias = bias_N if out_dtype == torch.bfloat16 else None
    return Arguments(
        mat_a=_codes(a, more_rows, more_summed),
        mat_b=_codes(b, more_cols, more_summed).T,
        scale_a=_row_scale(a.scale_inv, more_rows) if by_tile else a.scale_inv.reshape(()),
        scale_b=scale_b if by_tile else b.scale_inv.reshape(()),
        recipe_a=_recipe(a),
        recipe_b=_recipe(b),
        bias=None if bias is None else F.pad(bias.to(out_dtype), (0, more_cols)),
        out_dtype=out_dtype if out_dtype in _OUT else torch.float32,
        rows=rows,
        cols=cols,
    )


def finish(out: Tensor, call: Arguments, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Finish a `scaled_mm`: cut off the padding; add the bias where the call did not."""
    out = out[: call.rows, : call.cols].contiguous()
    if bias_N is not None and call.bias is None:
        out = out + bias_N.to(out_dtype).to(out.dtype)
    return out.to(out_dtype)


def _recipe(operand: TiledTensor) -> str:
    """Recipe of a `scaled_mm`: name of the member of `ScalingType`."""
    names = {ROW_TILE: "BlockWise1x128", BLOCK_TILE: "BlockWise128x128", TENSORWISE: "TensorWise"}
    return names[operand.tile]


def _codes(operand: TiledTensor, more_rows: int, more_cols: int) -> Tensor:
    """Codes for `scaled_mm`, row by row as torch's 8-bit dtype, zeros appended."""
    qdata = operand.qdata
    if more_rows or more_cols:
        qdata = F.pad(qdata, (0, more_cols, 0, more_rows))
    return _aligned(qdata.contiguous()).view(operand.spec.dtype)


def _row_scale(scale_inv: Tensor, more_rows: int) -> Tensor:
    """Row scales for `scaled_mm`: of 1x128 tiles [M, GK] with strides (1, M), ones appended."""
    transposed = scale_inv.T
    if more_rows:
        transposed = F.pad(transposed, (0, more_rows), value=1.0)
    return _outer_major(transposed.contiguous())


def _block_scale(scale_inv: Tensor) -> Tensor:
    """Block scales for `scaled_mm`: of 128x128 tiles [GN, GK] as [GK rounded up to 4, GN], the first dimension
    contiguous."""
    more = -scale_inv.shape[1] % 4
    if more:
        scale_inv = F.pad(scale_inv, (0, more), value=1.0)
    return _outer_major(scale_inv.contiguous())


def _outer_major(transposed: Tensor) -> Tensor:
    """Scales for `scaled_mm` outer-major: the transpose of [columns, rows], strides (1, rows) to the letter: a view of
    one column may say otherwise."""
    columns, rows = transposed.shape
    return _aligned(transposed).as_strided((rows, columns), (1, rows))


def _aligned(x: Tensor) -> Tensor:
    """x aligned for `scaled_mm`: copied where it is a slice that may not begin at 16 bytes."""
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x
