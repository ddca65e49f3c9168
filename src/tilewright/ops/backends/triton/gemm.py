"""a @ b.T of 8-bit operands on any GPU, the sum promoted to FP32 every 128 matmuls.

GPUs with an 8-bit matrix unit multiply the codes (its own sums are short of bits, hence the promotion); on others the
codes are decoded to BF16 while they are loaded, which is exact, so the operands are the same numbers everywhere.

Legend: M, N rows  K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats.spec import FP8_SPECS
from tilewright.formats.tiled import TiledTensor
from tilewright.ops.backends.triton.encode import round_like, to_fp32
from tilewright.ops.backends.triton.launch import INTERPRETED, has_fp8, raw, triton_op, wrap_triton


def tile_gemm(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiply two quantised matrices by a Triton GEMM: see `ops.gemm`.

    Args:
        a: [M, K] in tiles of 1x128, or with one scale.
        b: [N, K] in tiles of 1x128 or 128x128, or with one scale. Codes that do not lie row by row are copied so.
        bias_N: [N], rounded to out_dtype.
        out_dtype: FP32, BF16 or FP16.

    Returns:
        [M, N] in out_dtype.
    """
    # By integers: torch.compile does not trace a look-up by tile.
    tiles = (a.tile.rows, a.tile.cols, b.tile.rows, b.tile.cols)
    if tiles not in ((1, 128, 128, 128), (1, 128, 1, 128), (0, 0, 0, 0)):
        raise AssertionError(f"no matmul of tiles {a.tile} and {b.tile}; tile_gemm's contract has the pairs")
    b_rows = 1 if b.tile.rows == 1 else 128  # one scale of all serves a block of columns as well
    return multiply_codes(
        a.qdata, b.qdata, a.scale_inv, b.scale_inv, bias_N, a.spec.name, b.spec.name, b_rows, out_dtype
    )


@triton_op("tile_gemm")
def multiply_codes(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, a_spec: str, b_spec: str, b_rows: int,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """GEMM of codes in Triton. A scale of one element serves the whole operand."""
    num_rows, num_summed = a.shape
    num_cols = b.shape[0]
    out = torch.empty((num_rows, num_cols), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    a_format, b_format = FP8_SPECS[a_spec], FP8_SPECS[b_spec]
    a, b = a.contiguous(), b.contiguous()
    if has_fp8(a.device):
        a, b, decoded = a.view(a_format.dtype), b.view(b_format.dtype), 0
    else:
        decoded = 32 if INTERPRETED else 16
    a_strides = (0, 0) if a_scale.numel() == 1 else a_scale.stride()
    b_strides = (0, 0) if b_scale.numel() == 1 else b_scale.stride()

    def grid(meta):
        return (triton.cdiv(num_rows, meta["BLOCK_M"]) * triton.cdiv(num_cols, meta["BLOCK_N"]),)

    wrap_triton(_tuned_kernel)[grid](
        a, b, a_scale, b_scale, raw(out) if bias is None else raw(bias.to(out_dtype)), raw(out),
        num_rows, num_cols, num_summed, rows_bucket(num_rows), *a_strides, *b_strides,
        B_ROWS=b_rows, HAS_BIAS=bias is not None, DECODED=decoded,
        A_MANTISSA=a_format.mantissa_bits, A_BIAS=a_format.bias,
        B_MANTISSA=b_format.mantissa_bits, B_BIAS=b_format.bias,
        **({"BLOCK_M": 64, "BLOCK_N": 64, "GROUP": 4, "SUMMED": num_summed} if INTERPRETED else {"SUMMED": -1}),
    )  # fmt: skip
    return out


@triton.jit
def decode_bits(qdata, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Decode uint8 codes to FP32 values in the Triton GEMM, see `formats.encode.decode`."""
    wide = qdata.to(tl.int32)
    magnitude = wide & 0x7F
    dropped: tl.constexpr = 23 - MANTISSA
    normal = (magnitude << dropped) + ((127 - BIAS) << 23)
    # A subnormal is read as the smallest normal plus itself.
    tiny = tl.full(qdata.shape, (128 - BIAS) << 23, tl.int32)
    subnormal = ((magnitude << dropped) + tiny).to(tl.float32, bitcast=True) - tiny.to(tl.float32, bitcast=True)
    least: tl.constexpr = 1 << MANTISSA  # pyright: ignore[reportOperatorIssue]  # Triton compiles it
    bits = tl.where(magnitude < least, subnormal.to(tl.int32, bitcast=True), normal)
    if MANTISSA == 2:
        bits = tl.where(magnitude == 0x7C, 0x7F800000, bits)
        bits = tl.where(magnitude > 0x7C, 0x7FC00000, bits)
    else:
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    return (bits | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def operand(qdata, DECODED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The operands of the Triton GEMM: the 8-bit floats themselves, or their values with 16 or 32 bits."""
    if DECODED == 0:
        return qdata
    elif DECODED == 16:
        return decode_bits(qdata, MANTISSA, BIAS).to(tl.bfloat16)
    else:
        return decode_bits(qdata, MANTISSA, BIAS)


def rows_bucket(num_rows: int) -> int:
    """The bucket of row counts for which one configuration of the Triton GEMM is chosen. Each expert and each batch has
    other numbers of rows, and a choice takes tenths of a second. It also takes integers that torch.compile traces as
    symbols.

    Example:
        >>> [rows_bucket(rows) for rows in (1, 256, 257, 2048, 100_000)]
        [1, 1, 2, 8, 8]
    """
    return torch.sym_min((num_rows + 255) // 256, 8)  # pyright: ignore[reportReturnType]  # torch says float too


@triton.jit(do_not_specialize=["num_rows", "rows_bucket"])
def _gemm_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, num_rows, num_cols, num_summed, rows_bucket,
    a_scale_stride_row, a_scale_stride_tile, b_scale_stride_row, b_scale_stride_tile,
    B_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, DECODED: tl.constexpr,
    A_MANTISSA: tl.constexpr, A_BIAS: tl.constexpr, B_MANTISSA: tl.constexpr, B_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    # GROUP rows of blocks are walked column by column, so that their operands stay in the L2 cache.
    grid_m, grid_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_cols, BLOCK_N)
    group = tl.program_id(0) // (GROUP * grid_n)
    height = tl.minimum(grid_m - group * GROUP, GROUP)
    inside_group = tl.program_id(0) - group * GROUP * grid_n
    block_m, block_n = group * GROUP + inside_group % height, inside_group // height
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    summed = tl.arange(0, 128)
    a_at = a_ptr + rows[:, None].to(tl.int64) * num_summed + summed[None, :]
    b_at = b_ptr + cols[None, :].to(tl.int64) * num_summed + summed[:, None]
    a_scale_at = a_scale_ptr + rows.to(tl.int64) * a_scale_stride_row
    if B_ROWS == 1:
        b_scale_at = b_scale_ptr + cols.to(tl.int64) * b_scale_stride_row
    else:
        b_scale_at = b_scale_ptr + (block_n * BLOCK_N) // B_ROWS * b_scale_stride_row
    # Scales are read one iteration ahead: they feed no dot, so Triton would wait for them in each. Not those of the
    # columns of a tile, which would take more registers than there are.
    there = num_summed > 0
    a_scale = tl.load(a_scale_at, mask=(rows < num_rows) & there, other=0.0)
    if B_ROWS != 1:
        b_scale = tl.load(b_scale_at, mask=there, other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # The interpreter cannot count to a number that is no constant (triton 3.6 with numpy 2.4).
    for start in range(0, SUMMED if SUMMED >= 0 else num_summed, 128):
        left = num_summed - start
        a = tl.load(a_at, mask=(rows[:, None] < num_rows) & (summed[None, :] < left), other=0.0)
        b = tl.load(b_at, mask=(cols[None, :] < num_cols) & (summed[:, None] < left), other=0.0)
        there = left > 128
        if B_ROWS == 1:
            scale = a_scale[:, None] * tl.load(b_scale_at, mask=cols < num_cols, other=0.0)[None, :]
            b_scale_at += b_scale_stride_tile
        else:
            scale = (a_scale * b_scale)[:, None]
            b_scale_at += b_scale_stride_tile
            b_scale = tl.load(b_scale_at, mask=there, other=0.0)
        a_scale_at += a_scale_stride_tile
        a_scale = tl.load(a_scale_at, mask=(rows < num_rows) & there, other=0.0)
        part = tl.dot(
            operand(a, DECODED, A_MANTISSA, A_BIAS), operand(b, DECODED, B_MANTISSA, B_BIAS), input_precision="ieee"
        )  # fmt: skip
        total += part * scale
        a_at += 128
        b_at += 128
    if HAS_BIAS:
        total += to_fp32(tl.load(bias_ptr + cols, mask=cols < num_cols, other=0))[None, :]
    _, out = round_like(total, out_ptr.dtype.element_ty)
    out_at = out_ptr + rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    tl.store(out_at, out, mask=(rows[:, None] < num_rows) & (cols[None, :] < num_cols))


def _config(block_m: int, block_n: int, num_stages: int, num_warps: int) -> triton.Config:
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "GROUP": 8}
    return triton.Config(blocks, num_stages=num_stages, num_warps=num_warps)


_CONFIGS = [_config(128, 128, 4, 8), _config(128, 128, 3, 8), _config(128, 64, 4, 4), _config(64, 64, 3, 4)]
"""BLOCK_N divides 128, so that a block of columns has one scale a tile of b."""
_tuned_kernel = (
    _gemm_kernel
    if INTERPRETED
    else triton.autotune(_CONFIGS, key=["rows_bucket", "num_cols", "num_summed", "B_ROWS", "DECODED"])(_gemm_kernel)
)
