"""Parts of weights as the codes that their layers read: one byte per weight between the ranks that share a matrix.

A matrix [M, K] is cut into rows, as many on each rank. A layer in 8 bits reads it in E4M3 under a power-of-two scale
per 128x128 tile; a rank makes these codes of its rows. A tile that lies on several ranks has the scale of its largest
magnitude on all of them: one MAX all-reduce over the grid of scales, which is left out where every cut is at a multiple
of 128 rows. So the codes are those of the whole matrix at any cut, and their values, which FP32 and BF16 hold exactly,
are what the layer gets: quantised again they are the same values.

A row of bytes is what one rank sends of one piece after another: codes with the exponents of their scales, or values
as they are.

See: Megatron-LM, FP8 parameters; pytorch/ao, `precompute_float8_dynamic_scale_for_fsdp` (one all-reduce of scales).

Legend: M rows  K columns  R rows on a rank  T tiles down  U tiles across  B bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.formats.scaling import tile_amax
from tilewright.formats.spec import FP32_MANTISSA_BITS
from tilewright.formats.tiled import FP8_BLOCK
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.wire_messages import code_values, powers

TILE = FP8_BLOCK.tile.rows
_ROWS = 8 * TILE
"""Rows that are decoded at a time."""
EXACT = (torch.float32, torch.bfloat16)
"""Dtypes that hold the values of all codes."""


@dataclass(frozen=True)
class GatheredPart:
    """The part of one parameter that each rank sends, as codes or as values.

    Args:
        numel: values of a rank, filled up to those of the first one.
        dtype: of them, where they are gathered.
        shape: rows of a rank and columns, where codes are sent; None: values are sent as they are.
    """

    numel: int
    dtype: torch.dtype
    shape: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's part of a parameter as values, in their dtype, which codes spare.

        Example:
            >>> GatheredPart(300, torch.float32).nbytes, GatheredPart(300, torch.bfloat16, (3, 100)).sent_bytes
            (1200, 302)
        """
        return self.numel * self.dtype.itemsize

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends of a coded parameter, as codes or as values."""
        if self.shape is None:
            return self.nbytes
        down, across = self.grid
        return self.numel + down * across

    @property
    def grid(self) -> tuple[int, int]:
        """The grid of tiles of a coded part: rows of tiles, as many as a rank's rows can touch, and columns."""
        assert self.shape is not None, "of codes"
        rows, columns = self.shape
        down = rows // TILE if self.is_even else (rows + TILE - 2) // TILE + 1
        return down, -(-columns // TILE)

    @property
    def is_even(self) -> bool:
        """True if no tile of a coded parameter lies on two ranks."""
        return self.shape is None or self.shape[0] % TILE == 0

    def amax(self, part_RK: Tensor, rank: int, ranks: int) -> Tensor:
        """Largest magnitudes of the tiles of a coded part that this rank has some rows of: FP32 [T, U] of the whole
        matrix, zero where a tile is none of these. The largest over the ranks is what `pack` takes.

        Args:
            part_RK: this rank's rows.
            rank, ranks: among those that share the matrix.
        """
        rows, columns = part_RK.shape
        first = rank * rows
        found = torch.zeros(FP8_BLOCK.tile.grid((rows * ranks, columns)), device=part_RK.device)
        for tile in {first // TILE, (first + rows - 1) // TILE}:
            begin, end = max(first, tile * TILE), min(first + rows, (tile + 1) * TILE)
            if end - begin < TILE:
                found[tile] = tile_amax(part_RK[begin - first : end - first], FP8_BLOCK.tile)[0]
        return found

    def pack(self, part_RK: Tensor, rank: int, amax_TU: Tensor | None, kernels: Kernels) -> Tensor:
        """Pack this rank's codes and the exponents of their tiles' scales into one message: uint8, `sent_bytes`.

        Args:
            part_RK: its rows, FP32 or BF16.
            rank: among those that share the matrix.
            amax_TU: of tiles on several ranks, over all of them; None where there are none.
            kernels: whose `quantize` makes the codes.
        """
        rows, columns = part_RK.shape
        above = rank * rows % TILE
        x_RK = part_RK
        if amax_TU is not None:
            # A row beside this rank's own stands for what other ranks have of the tile: its largest magnitudes.
            first, last = rank * rows // TILE, (rank * rows + rows - 1) // TILE
            x_RK = part_RK.new_zeros(above + rows + 1, columns)
            x_RK[above : above + rows] = part_RK
            if above:
                x_RK[0, ::TILE] = amax_TU[first].to(part_RK.dtype)
            if (rank * rows + rows) % TILE:
                x_RK[-1, ::TILE] = amax_TU[last].to(part_RK.dtype)
            else:
                x_RK = x_RK[:-1]
        tiled = kernels.quantize(x_RK, FP8_BLOCK)
        # A normal power of two has its exponent alone in its bits.
        exponents = (tiled.scale_inv.contiguous().view(torch.int32) >> FP32_MANTISSA_BITS).to(torch.uint8).flatten()
        filled = exponents.new_zeros(self.sent_bytes - self.numel - len(exponents))
        return torch.cat([tiled.qdata[above : above + rows].reshape(-1), exponents, filled])

    def unpack(self, sent_B: Tensor, rank: int, out_RK: Tensor) -> None:
        """Unpack the values of a rank's codes from a message, into a tensor of its rows.

        Args:
            sent_B: what that rank has packed.
            rank: among those that share the matrix.
            out_RK: gets them, FP32 or BF16.
        """
        rows, columns = out_RK.shape
        codes_RK = sent_B[: self.numel].view(rows, columns)
        scale_TU = powers(sent_B.device)[sent_B[self.numel :].to(torch.int32)].view(self.grid)
        tile_R = (torch.arange(rows, device=sent_B.device) + rank * rows % TILE) // TILE
        for begin in range(0, rows, _ROWS):
            part = slice(begin, begin + _ROWS)
            value_RK = code_values(sent_B.device)[codes_RK[part].to(torch.int32)]
            scale_RK = scale_TU[tile_R[part]].repeat_interleave(TILE, dim=1)[:, :columns]
            out_RK[part] = value_RK.mul_(scale_RK)


def offsets(sizes: Sequence[int]) -> list[int]:
    """Offsets at which coded pieces begin, and the end of the last one.

    Example:
        >>> offsets([3, 4])
        [0, 3, 7]
    """
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found
