"""`IntegerQuantizer`: values rounded to INT8 or INT4 and back, with a gradient: the interface of `FP8Quantizer`, with
zero points and a step that can be learned. The values are bit for bit those of `formats.integer`.

See: Esser et al., "Learned Step Size Quantization", 2020 (gradient of the step, its scale and initial value).

Legend: M rows  K columns; grid [GM, GK] = tiles down and across.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.formats.integer import (
    SMALLEST_SCALE,
    IntegerTensor,
    IntSpec,
    encode_integer,
    scale_of_range,
    tile_range,
)
from tilewright.formats.scaling import TENSORWISE, Tile, spread_scale
from tilewright.precision.quantizers.quantizer import (
    FakeQuantizer,
    RoundedThrough,
    as_matrix,
    check_scale,
    check_static,
)

IntegerGranularity = Literal["tensor", "token", "channel", "group"]
FIXED = ("tensor", "channel", "group")
"""Granularities that may have a fixed scale; a token's is always its own."""


class IntegerQuantizer(FakeQuantizer):
    """Rounds to integers and back; the gradient passes straight through, and is zero where a value was clipped.

    Args:
        scale: fixed step, value = (code - zero_point) * scale: a number, or a tensor of the granularity's scales. None:
            from the range of each input, or of the first `calibrate_batches`.
        zero_point: code of zero, a whole number; 0 unless a scale is given.
        bits: 2 to 8.
        symmetric: zero point 0 for scales that are found.
        granularity: what shares a scale: "tensor"; "token" (the last dim); "channel" (all but the first dim) and
            "group" (`group` elements of a channel, the last one shorter where they do not divide) for weights.
        group: elements per scale of granularity "group".
        calibrate_batches: number of first inputs that each round with their own scale, and whose common range fixes it
            for those that follow. 0: never fixed.
        learned: `scale` is a parameter with the gradient of LSQ; begin with `lsq_step(weight, ...)`.
        clip_gradient: gradient zero where a value was clipped; False: one everywhere.

    Raises:
        ConfigError: an unknown name, a scale that is no positive number, a zero point out of range, or options that
            exclude one another.

    Example:
        >>> IntegerQuantizer(0.5, bits=4)(torch.tensor([0.3, 1.1, 9.0])).tolist()
        [0.5, 1.0, 3.5]
        >>> layer = nn.Linear(64, 4)
        >>> step = lsq_step(layer.weight, bits=4, granularity="group", group=32)
        >>> quantizer = IntegerQuantizer(step, bits=4, granularity="group", group=32, learned=True)
        >>> _ = nn.utils.parametrize.register_parametrization(layer, "weight", quantizer)
        >>> layer(torch.ones(2, 64)).sum().backward(); quantizer.scale.grad.shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        scale: float | Tensor | None = None,
        zero_point: int | Tensor = 0,
        *,
        bits: int = 8,
        symmetric: bool = True,
        granularity: IntegerGranularity = "tensor",
        group: int = 32,
        calibrate_batches: int = 0,
        learned: bool = False,
        clip_gradient: bool = True,
    ):
        _check(scale, zero_point, bits, granularity, group, calibrate_batches, learned)
        super().__init__(granularity, scale, calibrate_batches, clip_gradient)
        self.spec = IntSpec(bits, narrow=symmetric and bits == 8)
        self.symmetric, self.learned = symmetric, learned
        self.group = group
        value = None if scale is None else torch.as_tensor(scale, dtype=torch.float32).detach().clone()
        self.zero_point: Tensor | None
        if learned and value is not None:
            self.scale = nn.Parameter(value)
        else:
            self.register_buffer("scale", value)
        point = torch.as_tensor(zero_point, dtype=torch.int8)
        self.register_buffer("zero_point", point.clone() if bool(point.any()) else None)

    @property
    def tile(self) -> Tile:
        """The tile of an integer quantiser: which elements of the input's matrix share a scale."""
        return _tile(self.granularity, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """Run an integer quantiser: x of any shape, FP32, BF16 or FP16 -> the same shape and dtype."""
        return self._learned(as_matrix(x, self.granularity)).view(x.shape) if self.learned else super().forward(x)

    def _extremes(self, x_MK: Tensor) -> Tensor:
        low, high = tile_range(x_MK, self.tile)
        return torch.stack([-low, high])

    def _scale_of(self, extremes: Tensor) -> tuple[Tensor, Tensor | None]:
        return scale_of_range(-extremes[0], extremes[1], self.spec, symmetric=self.symmetric)

    def _set_scale(self, extremes: Tensor) -> None:
        self.scale, self.zero_point = self._scale_of(extremes)

    def _fixed(self, x_MK: Tensor) -> tuple[Tensor, Tensor | None]:
        scale = self.scale if self.scale is None or not self.learned else _positive(self.scale.detach())
        point = None if self.zero_point is None else self._fixed_grid(self.zero_point, x_MK)
        return self._fixed_grid(scale, x_MK), point

    def _round(self, x_MK: Tensor, extremes: Tensor | None, clip: bool) -> Tensor:
        scale, zero_point = self._fixed(x_MK) if extremes is None else self._scale_of(extremes)
        return round_to_integers(x_MK, scale, zero_point, self.tile, self.spec, clip=clip)

    def quantize(self, x: Tensor) -> IntegerTensor:
        """Quantise to the integers that `forward` rounds a calibrated or learned weight to: codes, scale and zero
        point."""
        x_MK = as_matrix(x.detach(), self.granularity)
        found = self._scale_of(self._extremes(x_MK)) if self.scale is None else self._fixed(x_MK)
        scale, zero_point = found[0].contiguous(), None if found[1] is None else found[1].contiguous()
        codes = encode_integer(x_MK, scale, zero_point, self.tile, self.spec)
        return IntegerTensor(codes, scale, zero_point, self.tile, self.spec)

    def reset(self) -> None:
        """Reset an integer quantiser: forget a range that was observed and calibrate again."""
        if self.learned:
            raise ValueError("a learned scale has nothing to calibrate")
        super().reset()
        self.zero_point = None

    def _learned(self, x_MK: Tensor) -> Tensor:
        """Quantise with a learned step (LSQ): autograd of s * round(clamp(x / s)) with rounding passed through; the
        step's gradient is scaled down."""
        assert self.scale is not None
        shape = (x_MK.shape[0], x_MK.shape[1])
        count = max(x_MK.numel() / max(self.scale.numel(), 1), 1)
        factor = (count * self.spec.highest) ** -0.5
        step = _positive(self.scale)
        step = spread_scale(self._fixed_grid(step.detach() + factor * (step - step.detach()), x_MK), self.tile, shape)
        steps = (x_MK.to(torch.float32) / step).clamp(self.spec.lowest, self.spec.highest)
        return ((steps + (steps.round() - steps).detach()) * step).to(x_MK.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load an integer quantiser: a zero point that was found comes with the scale."""
        if not self.learned and state_dict.get(prefix + "scale") is not None:
            point = state_dict.get(prefix + "zero_point")
            self.zero_point = None if point is None else torch.empty_like(point)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Describe an integer quantiser for print: its settings."""
        source = "learned scale" if self.learned else self._source()
        kind = "symmetric" if self.symmetric else "affine"
        return f"{self.spec.name} {kind}, scale per {self.granularity}, {source}"


def lsq_step(weight: Tensor, *, bits: int = 8, granularity: IntegerGranularity = "tensor", group: int = 32) -> Tensor:
    """Initial step of an integer quantiser that learns its scale (LSQ): 2 mean|w| / sqrt(highest code) of each tile,
    FP32 [GM, GK]."""
    weight_MK, tile = as_matrix(weight.detach(), granularity), _tile(granularity, group)
    spec = IntSpec(bits, narrow=bits == 8)
    shape = (weight_MK.shape[0], weight_MK.shape[1])
    (rows, cols), grid = tile.sizes(shape), tile.grid(shape)
    row = (torch.arange(shape[0], device=weight.device) // rows)[:, None]
    index = (row * grid[1] + torch.arange(shape[1], device=weight.device) // cols).flatten()
    sums = torch.zeros((2, grid[0] * grid[1]), device=weight.device)
    sums[0].index_add_(0, index, weight_MK.float().abs().flatten())
    sums[1].index_add_(0, index, torch.ones_like(index, dtype=torch.float32))
    return _positive((2 * sums[0] / sums[1].clamp(min=1) / spec.highest**0.5).view(grid))


def round_to_integers(
    x_MK: Tensor, scale: Tensor, zero_point: Tensor | None, tile: Tile, spec: IntSpec, *, clip: bool
) -> Tensor:
    """Round x to the integers of a grid and back, in its own dtype; the gradient passes straight through.

    Args:
        x_MK: [M, K], FP32, BF16 or FP16.
        scale: FP32, one for each tile; `zero_point` int8 beside it, or None.
        clip: gradient zero where a value lies outside of the grid.
    """

    def rounding(x_MK, scale, zero_point):
        codes = encode_integer(x_MK, scale, zero_point, tile, spec)
        return IntegerTensor(codes, scale, zero_point, tile, spec).dequantize(x_MK.dtype)

    def limits(scale, zero_point):
        point = 0 if zero_point is None else zero_point.float()
        return tuple((end - point) * scale for end in (spec.lowest, spec.highest))

    return RoundedThrough.apply(x_MK, scale, zero_point, rounding, limits, tile, clip)[0]


def _positive(scale: Tensor) -> Tensor:
    """Make the step of an integer quantiser positive: an optimizer may carry it through zero, and its sign means
    nothing."""
    return scale.abs().clamp(min=SMALLEST_SCALE)


def _tile(granularity: str, group: int) -> Tile:
    return {"tensor": TENSORWISE, "group": Tile(1, group)}.get(granularity, Tile(1, 0))


def _check(scale, zero_point, bits, granularity, group, calibrate_batches, learned) -> None:
    # Arguments by themselves, then in pairs that contradict each other.
    if not (isinstance(bits, int) and 2 <= bits <= 8):
        raise ConfigError(
            "Unknown number of bits", got=repr(bits), need="a whole number from 2 to 8", try_="bits = 8", where="bits"
        )
    if granularity not in ("tensor", "token", "channel", "group") or group < 1:
        raise ConfigError(
            "Unknown granularity",
            got=f"{granularity!r}, group = {group}",
            need="tensor, token, channel, or group with at least one element",
            try_='granularity = "channel"',
            where="granularity",
        )
    check_scale(scale)
    point = torch.as_tensor(zero_point)
    if bool(point.ne(0).any()) and (scale is None or learned or bool((point.abs() > 1 << (bits - 1)).any())):
        raise ConfigError(
            "Zero point without a fixed scale, or out of range",
            got=f"zero_point = {zero_point}, scale = {scale}",
            need=f"a fixed scale that is not learned, and a code of {bits} bits",
            try_="zero_point = 0; symmetric = False finds one",
            where="zero_point",
        )
    # A scale that is stored needs a number of tiles that does not follow the input's shape.
    static = calibrate_batches or learned or (isinstance(scale, Tensor) and scale.numel() > 1)
    how = "learned" if learned else f"calibrate_batches = {calibrate_batches}"
    check_static(granularity, FIXED, how if static else "")
    if learned and (scale is None or calibrate_batches):
        raise ConfigError(
            "Learned scale has no initial value",
            got=f"scale = {scale}, calibrate_batches = {calibrate_batches}",
            need="an initial step of each tile, known before the optimizer is made",
            try_="scale = lsq_step(weight, bits=..., granularity=...)",
            where="scale",
        )
