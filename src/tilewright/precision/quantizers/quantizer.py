"""Base of the quantisers of all formats: values rounded and decoded at once, with a gradient, for study and for
quantisation-aware training; fixed, found and calibrated scales; and what is refused.

The result is bit for bit that of `formats`; what is computed afterwards stays in the input's dtype, so nothing gets
faster or smaller. Quantisers are modules, so they stand anywhere in a model, also as a parametrisation of a weight.

See: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", 2013 (straight-through estimator).

Legend: M rows  K columns; grid [GM, GK] = tiles down and across.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.formats.scaling import Tile, spread_scale


class FakeQuantizer(nn.Module):
    """Rounds and decodes at once. Subclasses have the format; a scale is fixed, found for each input, or calibrated.

    Args:
        granularity: what shares a scale.
        scale: a fixed one, or None.
        calibrate_batches: number of first inputs that fix a scale.
        clip_gradient: gradient zero where a value was clipped.
    """

    scale: Tensor | None
    seen: Tensor | None
    """Largest of each extreme so far, while a scale is calibrated."""

    def __init__(self, granularity: str, scale: Any, calibrate_batches: int, clip_gradient: bool) -> None:
        super().__init__()
        self.granularity: Any = granularity
        self.calibrate_batches, self.clip_gradient = calibrate_batches, clip_gradient
        self._batches_left = 0 if scale is not None else calibrate_batches
        self.register_buffer("seen", None, persistent=False)

    @property
    def tile(self) -> Tile:
        """The tile of a quantiser: which elements of the input's matrix share a scale."""
        raise NotImplementedError

    def _extremes(self, x_MK: Tensor) -> Tensor:
        """Extremes of a quantiser's input from which a scale follows, [extremes, GM, GK]; of several inputs, the
        largest of each."""
        raise NotImplementedError

    def _set_scale(self, extremes: Tensor) -> None:
        """Set the fixed scale of a quantiser that follows from extremes."""
        raise NotImplementedError

    def _round(self, x_MK: Tensor, extremes: Tensor | None, clip: bool) -> Tensor:
        """Round x by a quantiser, with the scale of its own extremes or (None) the fixed one."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Run a quantiser: x of any shape, FP32, BF16 or FP16 -> the same shape and dtype."""
        x_MK = as_matrix(x, self.granularity)
        if self.scale is not None:
            return self._round(x_MK, None, self.clip_gradient).view(x.shape)
        extremes = self._extremes(x_MK.detach())
        if self._batches_left:
            self.seen = extremes if self.seen is None else torch.maximum(self.seen, extremes)
            self._batches_left -= 1
            if not self._batches_left:
                self._set_scale(self.seen)
        return self._round(x_MK, extremes, False).view(x.shape)

    def reset(self) -> None:
        """Reset a quantiser: forget the scale and calibrate again."""
        self.scale, self.seen, self._batches_left = None, None, self.calibrate_batches

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a quantiser: a scale that was found comes with the checkpoint, and ends the calibration."""
        stored = state_dict.get(prefix + "scale")
        if stored is not None and not isinstance(self.scale, nn.Parameter):
            self.scale, self._batches_left = torch.empty_like(stored, dtype=torch.float32), 0
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _fixed_grid(self, values: Tensor | None, x_MK: Tensor) -> Tensor:
        """Fixed scales or zero points of a quantiser as [GM, GK]."""
        assert values is not None, "asked for where there is one"
        grid = self.tile.grid((x_MK.shape[0], x_MK.shape[1]))
        if values.numel() not in (1, grid[0] * grid[1]):
            raise ConfigError(
                "Static scale does not fit the tensor",
                got=f"{list(values.shape)} scales",
                need=f"one, or {list(grid)} of granularity {self.granularity!r}",
                try_="a scale for this tensor, or scale = None",
                where="scale",
            )
        return values.reshape(1, 1).expand(grid) if values.numel() == 1 else values.reshape(grid)

    def _source(self) -> str:
        """The source of a quantiser's scales, for `extra_repr`."""
        if self.scale is not None:
            return "fixed scale"
        return f"scale fixed in {self._batches_left} batches" if self._batches_left else "scale of each input"


class RoundedThrough(torch.autograd.Function):
    """Rounds in forward; the gradient passes, but where `clip` and the value lay outside of the range.

    `rounding(x, scale, zero_point)` gives the values, `limits(scale, zero_point)` the range of each tile.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x_MK, scale, zero_point, rounding, limits, tile, clip):
        inside = None
        if clip:
            shape = (x_MK.shape[0], x_MK.shape[1])
            low, high = (spread_scale(limit, tile, shape) for limit in limits(scale, zero_point))
            inside = (x_MK >= low) & (x_MK <= high)
        return rounding(x_MK, scale, zero_point), inside

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.clip = output[1] is not None
        if ctx.clip:
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, grad_MK, _):
        grad = torch.where(ctx.saved_tensors[0], grad_MK, 0.0) if ctx.clip else grad_MK
        return grad, *[None] * 6


def as_matrix(x: Tensor, granularity: str) -> Tensor:
    """View a quantiser's input as a matrix [M, K]: rows are the first dim for granularities of weights, all but the
    last dim else."""
    if x.ndim == 0:
        return x.reshape(1, 1)
    if granularity in ("channel", "group"):
        return x.flatten(1) if x.ndim > 1 else x[:, None]
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def check_scale(scale: Any) -> None:
    """Check a quantiser's fixed scale: raise ConfigError unless it has finite values above 0."""
    if scale is None:
        return
    values = torch.as_tensor(scale, dtype=torch.float32)
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise ConfigError(
            "Scale is not a positive number",
            got=f"{scale}",
            need="finite values above 0",
            try_="scale = None, which finds it",
            where="scale",
        )


def check_static(granularity: str, fixed: Sequence[str], got: str) -> None:
    """Check that a quantiser's scales can be static: raise ConfigError where not. `got`: what asks for static ones;
    empty: nothing does."""
    if got and granularity not in fixed:
        raise ConfigError(
            f'Scales of granularity "{granularity}" cannot be static',
            got=got,
            need=f"one of {', '.join(fixed)}: of these every input has equally many",
            try_='granularity = "tensor", or a scale of each input',
            where="granularity",
        )
