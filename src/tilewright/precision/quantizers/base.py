"""What quantisers of all formats share: a matrix of any tensor, fixed scales and their grid, and what is refused.

Legend: M rows  K columns; grid [GM, GK] = tiles down and across.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError


class FakeQuantizer(nn.Module):
    """Rounds and decodes at once. Subclasses have the format; a scale is fixed, found for each input, or calibrated.

    Args:
        granularity: what shares a scale.
        scale: a fixed one, or None.
        calibrate_batches: number of first inputs that fix a scale.
    """

    scale: Tensor | None

    def __init__(self, granularity: str, scale: Any, calibrate_batches: int) -> None:
        super().__init__()
        self.granularity: Any = granularity
        self.calibrate_batches = calibrate_batches
        self._batches_left = 0 if scale is not None else calibrate_batches

    def _fixed_grid(self, values: Tensor, grid: tuple[int, int]) -> Tensor:
        """Fixed scales or zero points as [GM, GK]."""
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
        """Where scales come from, for `extra_repr`."""
        if self.scale is not None:
            return "fixed scale"
        return f"scale fixed in {self._batches_left} batches" if self._batches_left else "scale of each input"


def as_matrix(x: Tensor, granularity: str) -> Tensor:
    """x of any shape as [M, K]: rows are the first dim for granularities of weights, all but the last dim else."""
    if x.ndim == 0:
        return x.reshape(1, 1)
    if granularity in ("channel", "group"):
        return x.flatten(1) if x.ndim > 1 else x[:, None]
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def check_scale(scale: Any) -> None:
    """Raise ConfigError unless a fixed scale has finite values above 0."""
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
    """Raise ConfigError where scales cannot be static. `got`: what asks for static ones; empty: nothing does."""
    if got and granularity not in fixed:
        raise ConfigError(
            f'Scales of granularity "{granularity}" cannot be static',
            got=got,
            need=f"one of {', '.join(fixed)}: of these every input has equally many",
            try_='granularity = "tensor", or a scale of each input',
            where="granularity",
        )
