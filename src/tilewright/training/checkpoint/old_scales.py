"""8-bit moments of older checkpoints, whose scales were those of the flat tensor, in one dim.

Where a row is a number of whole blocks, they are the same scales in another shape. Elsewhere blocks lay across rows,
and the values get the codes and scales of their rows (`optim.states.scales_by_row`): each rank reads such a moment
whole.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewright.formats.quadratic_map import BLOCK, num_blocks, scale_shape
from tilewright.optim.shards import local, part_of
from tilewright.optim.states import scales_by_row
from tilewright.training.checkpoint.writing import Live

_SCALE = "_scale"

Stored = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class OldScales:
    """The moments of a checkpoint that have scales of the flat tensor.

    Args:
        stored: what the checkpoint holds.
    """

    def __init__(self, stored: Stored) -> None:
        self._moments = {
            name.removesuffix(_SCALE): shape
            for name, (_, shape) in stored.items()
            if name.endswith(_SCALE) and _is_flat(shape, stored.get(name.removesuffix(_SCALE)))
        }
        self._stored = stored

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all that is stored, as they will be loaded."""
        rows = {f"{name}{_SCALE}": scale_shape(self._stored[name][1]) for name in self._moments}
        return {name: rows.get(name, shape) for name, (_, shape) in self._stored.items()}

    def to_read(self) -> dict[str, Tensor]:
        """Empty tensors to read instead of those of these names: scales, and codes whose blocks lie across rows."""
        names = [f"{name}{_SCALE}" for name in self._moments]
        names += [name for name in self._moments if not _has_whole_blocks(self._stored[name][1])]
        return {name: torch.empty(self._stored[name][1], dtype=self._stored[name][0]) for name in names}

    @torch.no_grad()
    def fill(self, read: Mapping[str, Tensor], targets: Mapping[str, Tensor], live: Live | None) -> None:
        """Put what was read into the optimizer's states.

        Args:
            read: `to_read()`, read.
            targets: the states by name; shards of them.
            live: gives a target with its bytes, where they have only shapes.
        """
        for name in (name for name in targets if name in self._moments):
            codes, scale = read.get(name), read[f"{name}{_SCALE}"]
            if codes is None:
                made = {f"{name}{_SCALE}": scale.view(scale_shape(self._stored[name][1]))}
            else:
                made = scales_by_row({"exp_avg": codes, f"exp_avg{_SCALE}": scale})
                made = {name: made["exp_avg"], f"{name}{_SCALE}": made[f"exp_avg{_SCALE}"]}
            for key, value in made.items():
                target = targets[key] if live is None else live(key, targets[key])
                local(target).copy_(part_of(value, target))


def _is_flat(scale: tuple[int, ...], codes: tuple[torch.dtype, tuple[int, ...]] | None) -> bool:
    if codes is None or codes[0] not in (torch.int8, torch.uint8):
        return False
    return scale == (num_blocks(torch.Size(codes[1]).numel()),)


def _has_whole_blocks(shape: tuple[int, ...]) -> bool:
    rows, blocks = scale_shape(shape)
    return rows * blocks * BLOCK == torch.Size(shape).numel()
