"""Rows in windows of shards: the shards of a domain are shuffled each epoch, and rows inside so many of them at a time.

Few shards are then read at once, each once per epoch, and which row comes when stays a pure function of seed, domain
and epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.data.batches.mixture_order import permute
from tilewright.data.common.hashing import hash64

_ORDER, _INSIDE = 3, 4  # what hashes are of; `mix` has 1 and 2


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch of a domain in windows of shards."""

    shards: np.ndarray
    """Places of the domain's shards, in the order in which they are read."""
    row_starts: np.ndarray
    """Rows before each of them in this order, and all."""
    window_starts: np.ndarray
    """Rows before each window, and all."""

    def window_of(self, index: int) -> int:
        """The window of the epoch's row number `index`."""
        return int(np.searchsorted(self.window_starts, index, side="right")) - 1


class WindowedOrder:
    """The order of rows in windows of shards.

    Args:
        shard_rows: rows of each shard, by domain, in the order of the domain's rows.
        window: shards whose rows are shuffled together.
    """

    def __init__(self, shard_rows: Mapping[str, Sequence[int]], window: int) -> None:
        self.window = window
        self._rows = [np.array(rows, np.int64) for rows in shard_rows.values()]
        self._firsts = [np.cumsum(rows) - rows for rows in self._rows]
        self._known: dict[tuple[int, int, int], EpochOrder] = {}

    def epoch(self, seed: int, domain: int, epoch: int) -> EpochOrder:
        """The order of windows in an epoch; of a domain's place in the mixture."""
        key = seed, domain, epoch
        if key not in self._known:
            if len(self._known) > 8 * len(self._rows):
                self._known.clear()
            rows = self._rows[domain]
            number = len(rows)
            shards = permute(
                np.arange(number), np.full(number, number), np.repeat(hash64(seed, _ORDER, domain, epoch), number)
            )
            starts = np.append(0, np.cumsum(rows[shards]))
            self._known[key] = EpochOrder(shards, starts, np.append(starts[:-1][:: self.window], starts[-1]))
        return self._known[key]

    def rows(self, seed: int, domain: np.ndarray, epoch: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The rows in windows of domains that come as these numbers of an epoch: see `mix.RowOrder`."""
        found = np.empty(len(index), np.int64)
        for one, turn in sorted(set(zip(domain.tolist(), epoch.tolist(), strict=True))):
            here = (domain == one) & (epoch == turn)
            order = self.epoch(seed, one, turn)
            window = np.searchsorted(order.window_starts, index[here], side="right") - 1
            start = order.window_starts[window]
            size = order.window_starts[window + 1] - start
            at = start + permute(index[here] - start, size, hash64(seed, _INSIDE, one, turn, window))
            slot = np.searchsorted(order.row_starts, at, side="right") - 1
            found[here] = self._firsts[one][order.shards[slot]] + at - order.row_starts[slot]
        return found

    def window_shards(self, seed: int, domain: int, epoch: int, window: int) -> np.ndarray:
        """Places of the shards of a window among those of the domain."""
        return self.epoch(seed, domain, epoch).shards[window * self.window : (window + 1) * self.window]
