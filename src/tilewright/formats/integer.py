"""Integer formats: scales, zero points and codes of 2 to 8 bits. The definition of right, in plain torch.

    value = (code - zero_point) * scale,    code = clamp(round(value / scale) + zero_point)

Rounding is to nearest, ties to even. Division is true division in FP32, so the codes are the same on every machine.
A `Tile` says what shares a scale: tensorwise, rowwise (a channel of a weight, a token of an activation) or a group of a
row, `Tile(1, 32)`. Where a group's size does not divide the row, its last group is shorter; nothing is padded.

Ranges. Symmetric INT8 is -127..127: so weights negate exactly, and consumers agree (ONNX Runtime, TensorRT, llama.cpp's
Q8_0). INT4 is -8..7, not -7..7: a sixteenth of the codes is too much to give away. Its symmetric scale is the smallest
that clips nothing, the larger of max / 7 and -min / 8.

A tile with an element that is not finite gets the scale NaN, and every value of it comes back as NaN: integers have no
code for it, and an overflow must stay visible. An empty tensor has codes and scales of no elements; a tile of zeros has
the smallest scale and decodes to zeros.

Legend: M rows  K columns; grid [GM, GK] = tiles down and across.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.formats.nibbles import pack_nibbles, unpack_nibbles
from tilewright.formats.scaling import Tile, spread_scale
from tilewright.formats.spec import TF32, round_to

FP32_EPS = 2.0**-23
SMALLEST_SCALE = 2.0**-126
"""The smallest normal FP32. What is below half of it becomes zero."""


@dataclass(frozen=True)
class IntSpec:
    """Signed integers of `bits` bits.

    Args:
        bits: 2 to 8.
        narrow: leave the lowest code out, so that the range is symmetric (-127..127).

    Raises:
        ValueError: another number of bits.

    Example:
        >>> (INT8.lowest, INT8.highest), (INT4.lowest, INT4.highest), INT8_AFFINE.lowest, INT4.name
        ((-127, 127), (-8, 7), -128, 'int4')
    """

    bits: int
    narrow: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"integer formats have 2 to 8 bits, not {self.bits}")

    @property
    def name(self) -> str:
        """Name of an integer format, as recipes and reports write it."""
        return f"int{self.bits}"

    @property
    def lowest(self) -> int:
        """Smallest code of an integer format."""
        return -(1 << (self.bits - 1)) + self.narrow

    @property
    def highest(self) -> int:
        """Largest code of an integer format."""
        return (1 << (self.bits - 1)) - 1


INT8 = IntSpec(8, narrow=True)
"""Symmetric INT8."""
INT8_AFFINE = IntSpec(8)
"""INT8 with a zero point: all 256 codes."""
INT4 = IntSpec(4)


@dataclass(frozen=True)
class IntegerTensor:
    """A matrix in integer codes. Value of an element = (code - zero point of its tile) * scale of its tile.

    Args:
        codes: int8 [M, K], one code per byte; `packed` gives what is stored.
        scale: FP32 [GM, GK], positive, or negative where a format stores it so (Q4_0) and it was asked for; NaN where
            the tile held a value that was not finite.
        zero_point: int8 [GM, GK], or None where it is zero everywhere (symmetric).
        tile: which elements share a scale.
        spec: the format.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    tile: Tile
    spec: IntSpec

    def __post_init__(self) -> None:
        points = self.scale.to(torch.int8) if self.zero_point is None else self.zero_point
        if (self.codes.dtype, self.scale.dtype, points.dtype) != (torch.int8, torch.float32, torch.int8):
            raise ValueError(f"codes are int8 and scales FP32, not {self.codes.dtype} and {self.scale.dtype}")
        grid = self.tile.grid(self.shape) if self.codes.ndim == 2 else ()
        if not grid or tuple(self.scale.shape) != grid or tuple(points.shape) != grid:
            raise ValueError(
                f"codes {list(self.codes.shape)} in tiles of {self.tile} need scales {list(grid)}, not "
                f"{list(self.scale.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of an integer tensor."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """The bytes of an integer tensor as stored: packed codes, scales, zero points."""
        rows, cols = self.shape
        codes = rows * -(-cols // 2) if self.spec.bits <= 4 else rows * cols
        return codes + self.scale.nbytes + (0 if self.zero_point is None else self.zero_point.nbytes)

    def packed(self) -> Tensor:
        """The codes of an integer tensor as stored: uint8 [M, ceil(K / 2)] up to 4 bits (see `nibbles`), else int8 [M,
        K]."""
        return pack_nibbles(self.codes) if self.spec.bits <= 4 else self.codes

    @classmethod
    def from_packed(
        cls, stored: Tensor, cols: int, scale: Tensor, zero_point: Tensor | None, tile: Tile, spec: IntSpec
    ) -> "IntegerTensor":
        """Make an integer tensor from its packed codes: the matrix of `cols` columns whose `packed()` is `stored`."""
        codes = unpack_nibbles(stored, cols) if spec.bits <= 4 else stored
        return cls(codes, scale, zero_point, tile, spec)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [M, K] of an integer tensor, computed in FP32."""
        value = decode_integer(self.codes, self.scale, self.zero_point, self.tile)
        return value if value.dtype == dtype else value.to(dtype)  # as in `TiledTensor.dequantize`


def quantize_integer(x_MK: Tensor, spec: IntSpec, tile: Tile, *, symmetric: bool = True) -> IntegerTensor:
    """Quantise to integers: scale each tile by its own range and round.

    Symmetric: values are at most half a step from what they were. Affine: zero stays exactly zero, the range is widened
    to hold it, and only the end of the range may be off by up to one step (the zero point is an integer).

    Args:
        x_MK: [M, K], any float dtype and size; computed in FP32.
        spec: the format.
        tile: which elements share a scale.
        symmetric: zero point zero.

    Example:
        >>> from tilewright.formats.scaling import TENSORWISE
        >>> x = torch.tensor([[0.0, 1.0, 2.54]])
        >>> quantize_integer(x, INT8, TENSORWISE).codes.tolist()
        [[0, 50, 127]]
        >>> affine = quantize_integer(x, INT8_AFFINE, TENSORWISE, symmetric=False)
        >>> affine.codes.tolist(), affine.zero_point.item()
        ([[-128, -28, 127]], -128)
    """
    scale, zero_point = scale_of_range(*tile_range(x_MK, tile), spec, symmetric=symmetric)
    return IntegerTensor(encode_integer(x_MK, scale, zero_point, tile, spec), scale, zero_point, tile, spec)


def pair_scale(weight_MK: Tensor) -> Tensor:
    """Scales [M, 1] of integer (INT8) rows whose dot products with unsigned bytes no CPU clips.

    CPUs without VNNI multiply unsigned by signed bytes with vpmaddubsw, which adds the products of columns 2i and 2i +
    1
    in 16 bits and clips the sum: 255 * (127 + 127) is too much. Here two such codes sum to 128 at most, of either sign:
    255 * 128 fits. Rows of normal numbers lose half a bit by it, where halving every code would lose a whole one.

    Args:
        weight_MK: float; an odd last column stands alone.

    Example:
        >>> weight = torch.tensor([[1.0, 1.0, -1.0, 1.0]])  # a pair of one sign, a pair of two
        >>> (weight / pair_scale(weight)).round().tolist()
        [[64.0, 64.0, -64.0, 64.0]]
    """
    low, high = tile_range(weight_MK, Tile(1, 0))
    x = weight_MK.to(torch.float32)
    if weight_MK.shape[1] > 1:
        sums = x[:, 0 : x.shape[1] // 2 * 2 : 2] + x[:, 1::2]
        high = torch.maximum(high, sums.amax(1, keepdim=True))
        low = torch.minimum(low, sums.amin(1, keepdim=True))
    return scale_of_range(low, high, INT8)[0]


def quantize_pairs(weight_MK: Tensor) -> IntegerTensor:
    """Quantise in integers by pairs: a matrix in INT8 with the scales of `pair_scale`: what integer matmuls of exported
    files hold."""
    scale = pair_scale(weight_MK)
    return IntegerTensor(encode_integer(weight_MK, scale, None, Tile(1, 0), INT8), scale, None, Tile(1, 0), INT8)


def tile_range(x_MK: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each tile and zero: FP32 [GM, GK] each. NaN where an element is."""
    shape = (x_MK.shape[0], x_MK.shape[1])
    (rows, cols), (grid_rows, grid_cols) = tile.sizes(shape), tile.grid(shape)
    if x_MK.numel() == 0:
        empty = torch.zeros((grid_rows, grid_cols), dtype=torch.float32, device=x_MK.device)
        return empty, empty
    missing = (grid_rows * rows - shape[0], grid_cols * cols - shape[1])
    x = F.pad(x_MK.to(torch.float32), (0, missing[1], 0, missing[0])) if any(missing) else x_MK.to(torch.float32)
    tiles = x.reshape(grid_rows, rows, grid_cols, cols)
    return tiles.amin(dim=(1, 3)).clamp(max=0), tiles.amax(dim=(1, 3)).clamp(min=0)


def scale_of_range(low: Tensor, high: Tensor, spec: IntSpec, *, symmetric: bool = True) -> tuple[Tensor, Tensor | None]:
    """The scale and zero point (None: symmetric) of an integer format for values from `low` to `high`, FP32, low <= 0
    <= high."""
    if symmetric:
        scale = torch.maximum(high / _like(high, spec.highest), low / _like(low, spec.lowest))
        return _decodable(_valid(scale, low, high), low, high, spec, 0.0), None
    steps = _like(high, spec.highest - spec.lowest)
    scale = _valid(high / steps - low / steps, low, high)  # each divided first: the difference may overflow
    zero_point = (spec.lowest - low / scale).round().clamp(spec.lowest, spec.highest)
    return _decodable(scale, low, high, spec, zero_point), torch.nan_to_num(zero_point).to(torch.int8)


def half_scale(scale: Tensor) -> Tensor:
    """An integer format's scale that FP16 holds, in FP32: for formats that store it so. NaN and the sign stay.

    Of FP16's normal numbers the nearest. Below them steps are of 2^-24, and it is the next above, so that a small
    group's largest value is not clipped; above them it is the largest.

    By TF32, which has as many digits: compilers leave out a cast to FP16 and back.

    Example:
        >>> half_scale(torch.tensor([0.1, -1e-6, 1e-30, 1e30])).tolist()
        [0.0999755859375, -1.0132789611816406e-06, 5.960464477539063e-08, 65504.0]
    """
    size = scale.abs()
    small = (size * 2.0**24).ceil().clamp(min=1.0) * 2.0**-24
    normal = round_to(size.clamp(2.0**-14, 65504.0), TF32)
    return torch.copysign(torch.where(size < 2.0**-14, small, normal), scale)


def encode_integer(x_MK: Tensor, scale: Tensor, zero_point: Tensor | None, tile: Tile, spec: IntSpec) -> Tensor:
    """Encode values as integers under given scales: int8 [M, K]; values beyond the range are clipped, NaN becomes 0."""
    shape = (x_MK.shape[0], x_MK.shape[1])
    steps = (x_MK.to(torch.float32) / spread_scale(scale, tile, shape)).round()
    if zero_point is not None:
        steps = steps + spread_scale(zero_point, tile, shape)
    return torch.nan_to_num(steps.clamp(spec.lowest, spec.highest), nan=0.0).to(torch.int8)


def decode_integer(codes_MK: Tensor, scale: Tensor, zero_point: Tensor | None, tile: Tile) -> Tensor:
    """Decode integer codes to FP32 values [M, K]."""
    shape = (codes_MK.shape[0], codes_MK.shape[1])
    steps = codes_MK.to(torch.float32)
    if zero_point is not None:
        steps = steps - spread_scale(zero_point, tile, shape)
    return steps * spread_scale(scale, tile, shape)


def _decodable(scale: Tensor, low: Tensor, high: Tensor, spec: IntSpec, zero_point: Tensor | float) -> Tensor:
    """Lower an integer scale until the codes of `low` and `high` decode without overflow. Near the largest number a
    rounded scale, or a whole zero point, may lead beyond it."""
    ends = [(x / scale).round() + zero_point for x in (low, high)]
    reached = [(end.clamp(spec.lowest, spec.highest) - zero_point).abs() for end in ends]
    most = torch.maximum(*reached).clamp(min=1.0)
    return torch.minimum(scale, _like(scale, torch.finfo(torch.float32).max * (1 - FP32_EPS)) / most)


def _valid(scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    finite = torch.isfinite(low) & torch.isfinite(high)
    return torch.where(finite, scale.clamp(min=SMALLEST_SCALE), torch.nan)


def _like(x: Tensor, value: float) -> Tensor:
    """A divisor of an integer format's values as a tensor: on a GPU torch divides by a plain number through its
    inverse, which rounds twice."""
    return torch.full_like(x, value)
