"""Tiles of a matrix and the scale of each: from the largest magnitude to `scale_inv`.

`scale_inv` is the decode scale: value = code value * scale_inv. A power of two by default: then a code times its scale
is exact in BF16, so a BF16 matmul of the decoded operands multiplies the very numbers that an FP8 unit multiplies.
A `ScaleSpec` says which elements share a scale, how it follows from them and what it is stored in: FP32 for our tiles,
E8M0 for MX, E4M3 under an FP32 scale of the whole tensor for NVFP4.

See: DeepSeek-V3 report, section 3.3.2 (1x128 tiles for activations, 128x128 blocks for weights); OCP Microscaling
Formats (MX) v1.0, section 6.3; NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, appendix B.

Legend: M rows  K columns  T tile rows  U tile columns; grid [GM, GK] = tiles down and across.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.formats.encode import E8M0_NAN, decode_e8m0, encode, encode_e8m0
from tilewright.formats.spec import FP8_SPECS, FP32_MANTISSA_BITS, FloatSpec

_FP32_BIAS = 127
_LEAST_SECOND = 2.0**-116
"""Of a tensor's scale: under it the least scale of a tile in E4M3 (2^-9) still gives a normal FP32 number."""
_FP32_INF_BITS = 0x7F800000


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a matrix that share a scale. 0 stands for all of them.

    Tiles at the right and lower edge may be smaller; a ragged matrix needs no padding.

    Example:
        >>> Tile(128, 128).grid((300, 576)), Tile(0, 0).grid((300, 576)), str(Tile(1, 128)), Tile(1, 128).transposed()
        ((3, 5), (1, 1), '1x128', Tile(rows=128, cols=1))
    """

    rows: int
    cols: int

    def __str__(self) -> str:
        return {(0, 0): "tensorwise", (1, 0): "rowwise", (0, 1): "columnwise"}.get(
            (self.rows, self.cols), f"{self.rows}x{self.cols}"
        )

    def transposed(self) -> "Tile":
        """The tile of scaling that has the same members in the transposed matrix."""
        return Tile(self.cols, self.rows)

    def sizes(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The rows and columns of a full tile in a matrix of this shape, at least 1."""
        return self.rows or max(shape[0], 1), self.cols or max(shape[1], 1)

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The numbers of tiles down and across a matrix: the shape of the scales."""
        rows, cols = self.sizes(shape)
        return -(-shape[0] // rows), -(-shape[1] // cols)


ROW_TILE = Tile(1, 128)
"""Activations and gradients, along the dimension that a matmul sums over."""
COLUMN_TILE = Tile(128, 1)
"""The same for a matrix whose rows are summed over, as in a weight gradient."""
BLOCK_TILE = Tile(128, 128)
"""Weights: the same scales serve the matrix and its transpose."""
TENSORWISE = Tile(0, 0)


@dataclass(frozen=True)
class ScaleSpec:
    """Which elements share a scale, how it follows from their largest magnitude, and what it is stored in.

    Args:
        tile: which elements share one.
        dtype: float32, float8_e8m0fnu, or another float dtype.
        rule: "ceil", the least power of two that clips nothing (ours, and NVIDIA's for MXFP8); "floor", the greatest
            power of two up to amax / the format's largest power of two (OCP MX: it may clip the largest element);
            "exact", amax / the format's largest value, rounded to `dtype`.
        second: there is a scale of the whole tensor too, in FP32, that brings the largest scale to the top of `dtype`.

    Raises:
        ValueError: E8M0 with "exact", or a second scale over others than narrow ones with "exact".

    Example:
        >>> from tilewright.formats.spec import E4M3
        >>> MX_SCALE.scales(torch.tensor([[3.0]]), E4M3)[0].float().item()  # 2^(1 - 8)
        0.0078125
        >>> str(ROW_SCALE), str(MX_SCALE), str(NVFP4_SCALE)
        ('1x128', '1x32 e8m0', '1x16 e4m3 + float32')
    """

    tile: Tile
    dtype: torch.dtype = torch.float32
    rule: Literal["ceil", "floor", "exact"] = "ceil"
    second: bool = False

    def __post_init__(self) -> None:
        if self.is_e8m0 and self.rule == "exact":
            raise ValueError("E8M0 holds powers of two: its rule is ceil or floor")
        if self.second and (self.rule != "exact" or self.dtype == torch.float32):
            raise ValueError("a second scale makes up for the range of exact ones that are narrower than FP32")

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.").removeprefix("float8_").removesuffix("fnu").removesuffix("fn")
        usual = {"float32": "ceil", "e8m0": "floor"}.get(name, "exact")
        parts = (name if name != "float32" else "", "+ float32" if self.second else "", self.rule)
        return " ".join([str(self.tile), *(part for part in parts if part and part != usual)])

    @property
    def is_e8m0(self) -> bool:
        """True if scaling is E8M0: scales are stored as exponents."""
        return self.dtype == torch.float8_e8m0fnu

    def transposed(self) -> "ScaleSpec":
        """The scaling of the transposed matrix."""
        return replace(self, tile=self.tile.transposed())

    def relaxed(self, *, power_of_two: bool) -> "ScaleSpec":
        """Relaxed scaling unless `power_of_two`: exact scales in place of the least power of two, where FP32 holds
        them."""
        relaxes = not power_of_two and self.dtype == torch.float32 and self.rule == "ceil"
        return replace(self, rule="exact") if relaxes else self

    def scales(self, amax: Tensor, element: FloatSpec, unsound: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scales [GM, GK] of a scaling as stored, and the tensor's own, FP32 [1, 1], where there is one.

        Args:
            amax: FP32 [GM, GK], largest finite magnitude of each tile.
            element: what the scaled values are rounded to.
            unsound: bool [GM, GK], tiles whose scale is NaN, since their codes have none. What is finite in them counts
                in the tensor's own scale, so that other tiles keep their values.
        """
        info = torch.finfo(self.dtype) if not self.is_e8m0 else None
        second = None
        if self.dtype == torch.float32:
            scale = scale_inv_of(amax, element, power_of_two=self.rule == "ceil", floor=self.rule == "floor")
        elif self.rule != "exact":
            exponent = _exponent(amax, element, floor=self.rule == "floor")
            if info is None:
                codes = encode_e8m0(exponent)
                codes = codes if unsound is None else torch.where(unsound, E8M0_NAN, codes).to(torch.uint8)
                return codes.view(self.dtype), None
            least, most = (math.frexp(value)[1] - 1 for value in (info.smallest_normal, info.max))
            scale = power_of_two_of(exponent.clamp(least, most))
        else:
            assert info is not None  # E8M0 has no exact scales
            scale = amax / torch.full_like(amax, element.max)
            if self.second:
                second = self._second(amax, element)
                scale = scale / second
            # Not zero, which nothing can be divided by. (NVIDIA's kernel makes such a tile zero, torchao takes 2^-6.)
            scale = scale.clamp(info.smallest_normal * info.eps, info.max)
        return _stored(scale if unsound is None else torch.where(unsound, torch.nan, scale), self.dtype), second

    def _second(self, amax: Tensor, element: FloatSpec) -> Tensor:
        most = amax.amax().view(1, 1) if amax.numel() else amax.new_zeros((1, 1))
        second = (most / torch.full_like(most, element.max * torch.finfo(self.dtype).max)).clamp(min=_LEAST_SECOND)
        return torch.where(most > 0, second, 1.0)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = next((spec for spec in FP8_SPECS.values() if spec.dtype == dtype), None)
    return scale.to(dtype) if narrow is None else encode(scale, narrow).view(dtype)


def scale_values(scale_inv: Tensor, second: Tensor | None = None) -> Tensor:
    """The FP32 values of stored scales (FP32, BF16, FP16, E4M3, E5M2 or E8M0), exact, times the tensor's own scale."""
    if scale_inv.dtype == torch.float8_e8m0fnu:
        scale = decode_e8m0(scale_inv.view(torch.uint8))
    else:
        scale = scale_inv.to(torch.float32)
    return scale if second is None else scale * second


def tile_amax(x_MK: Tensor, tile: Tile) -> Tensor:
    """The largest finite magnitude of each tile, FP32 [GM, GK]; 0 where a tile has none.

    Infinities and NaN are left out, so that they do not spoil their neighbours' scale; `encode` marks them.
    """
    (rows, cols), (grid_rows, grid_cols) = tile.sizes(_shape(x_MK)), tile.grid(_shape(x_MK))
    if x_MK.numel() == 0:
        return x_MK.new_zeros((grid_rows, grid_cols), dtype=torch.float32)
    magnitude = x_MK.to(torch.float32).abs()
    magnitude = torch.where(magnitude < torch.inf, magnitude, 0.0)  # NaN compares false
    missing = (grid_rows * rows - x_MK.shape[0], grid_cols * cols - x_MK.shape[1])
    if any(missing):
        magnitude = F.pad(magnitude, (0, missing[1], 0, missing[0]))
    return magnitude.view(grid_rows, rows, grid_cols, cols).amax(dim=(1, 3))


def scale_inv_of(amax: Tensor, spec: FloatSpec, *, power_of_two: bool = True, floor: bool = False) -> Tensor:
    """The decode scale in FP32 that brings `amax` to the top of the format without passing it.

    Power of two: the smallest 2^k with amax <= max * 2^k, by integer arithmetic on the bits. Else amax / max.
    `floor`: the greatest 2^k with 2^k * (the largest power of two of the format) <= amax, see `ScaleSpec`.
    k is kept where every scaled code is a normal BF16 number (E4M3: -117 to 119), so values beyond 448 * 2^119
    saturate and those below 2^-127 vanish. Zeros get the smallest scale.

    Args:
        amax: FP32, finite, not negative.
        spec: of the codes.
        power_of_two: round the scale up to one.
        floor: round it down to one.

    Example:
        >>> from tilewright.formats.spec import E4M3
        >>> scale_inv_of(torch.tensor([448.0, 449.0, 3.0]), E4M3).tolist()
        [1.0, 2.0, 0.0078125]
    """
    least, most = exponent_range(spec)
    if not power_of_two and not floor:
        # By a tensor: on a GPU torch divides by a number through its inverse, which rounds twice.
        return amax.clamp(spec.max * 2.0**least, spec.max * 2.0**most) / torch.full_like(amax, spec.max)
    return power_of_two_of(_exponent(amax, spec, floor=floor).clamp(least, most))


def _exponent(amax: Tensor, spec: FloatSpec, *, floor: bool) -> Tensor:
    # A mantissa above that of the format's largest value carries into the exponent.
    above = 0 if floor else (1 << FP32_MANTISSA_BITS) - 1 - _mantissa_of_max(spec)
    return ((amax.view(torch.int32) + above) >> FP32_MANTISSA_BITS) - _FP32_BIAS - spec.max_exponent


def exponent_range(spec: FloatSpec) -> tuple[int, int]:
    """The least and the greatest k of a scale 2^k, such that smallest * 2^k is a normal BF16 and max * 2^k is
    finite."""
    smallest_exponent = 1 - spec.bias - spec.mantissa_bits
    return -126 - smallest_exponent, 127 - spec.max_exponent


def encode_scale_of(scale_inv: Tensor, *, power_of_two: bool = True) -> Tensor:
    """The encode scale of scaling, the factor of values before: 1 / scale_inv, exact for powers of two."""
    if not power_of_two:
        return 1.0 / scale_inv
    return ((2 * _FP32_BIAS << FP32_MANTISSA_BITS) - scale_inv.view(torch.int32)).view(torch.float32)


def power_of_two_of(exponent: Tensor) -> Tensor:
    """The FP32 scale 2^k for int32 k from -126 to 127."""
    return ((exponent + _FP32_BIAS) << FP32_MANTISSA_BITS).view(torch.float32)


def spread_scale(scale: Tensor, tile: Tile, shape: tuple[int, int]) -> Tensor:
    """Scales [GM, GK] to one an element (views where they can be), [M, K]."""
    rows, cols = tile.sizes(shape)
    grid_rows, grid_cols = scale.shape
    if torch.compiler.is_compiling() and (shape[0] % rows or shape[1] % cols):
        return scale[_tile_of(shape[0], rows, scale)[:, None], _tile_of(shape[1], cols, scale)]
    wide = scale[:, None, :, None].expand(grid_rows, rows, grid_cols, cols)
    return wide.reshape(grid_rows * rows, grid_cols * cols)[: shape[0], : shape[1]]


def _tile_of(size: int, width: int, like: Tensor) -> Tensor:
    """Tile of scaling by number that each of `size` rows or columns is in: int64 [size].

    For compiled code with ragged tiles, and by way of floating point: inductor for CPUs splits a loop whose index is
    divided by an integer, and forgets the ragged end (`try_loop_split` of torch 2.13). Codes there were never written.
    """
    return (torch.arange(size, device=like.device, dtype=torch.float64) / width).floor().to(torch.int64)


ROW_SCALE = ScaleSpec(ROW_TILE)
MX_SCALE = ScaleSpec(Tile(1, 32), torch.float8_e8m0fnu, "floor")
"""Of all MX formats: E4M3, E5M2 (MXFP8) and E2M1 (MXFP4)."""
NVFP4_SCALE = ScaleSpec(Tile(1, 16), torch.float8_e4m3fn, "exact", second=True)
"""Of E2M1 in NVFP4."""


def _mantissa_of_max(spec: FloatSpec) -> int:
    return int((spec.max / 2.0**spec.max_exponent - 1) * 2**FP32_MANTISSA_BITS)


def _shape(x_MK: Tensor) -> tuple[int, int]:
    return x_MK.shape[0], x_MK.shape[1]
