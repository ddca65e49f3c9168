"""The tokens of all shards, indexed as the one array that they would be behind each other.

Tokens of a shard that cannot be read are zeros that are no targets.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tilewright.data.dataset.remote.read_ahead import Unreadable
from tilewright.data.dataset.remote.shard_index import ShardIndex

_MORE = 64  # arrays that are kept open beside those in use
Arrays = tuple[np.ndarray, np.ndarray | None]


class ShardTokens:
    """Stands for the training stream [tokens], and with `marks` for the bytes that say which tokens are targets.

    Args:
        index: of the shards.
        bytes_of: content of a shard, see `ReadAhead.bytes_of`.
    """

    def __init__(self, index: ShardIndex, bytes_of: Callable[[int], bytes | Path | Unreadable]) -> None:
        self.index, self._bytes_of = index, bytes_of
        self.starts = np.append(0, np.cumsum([shard.tokens for shard in index.shards], dtype=np.int64))
        """First token of each shard, and the number of all."""
        self.dtype = np.dtype(index.dtype)
        self._open: dict[int, tuple[bytes | Path | Unreadable, Arrays]] = {}

    def __getitem__(self, at: np.ndarray | slice) -> np.ndarray:
        """Tokens of shards at these positions."""
        return self._taken(at, marks=False)

    def marks(self) -> "_Marks":
        """Marks of shards' tokens: 1 where one is a target."""
        return _Marks(self)

    def _taken(self, at: np.ndarray | slice, *, marks: bool) -> np.ndarray:
        if isinstance(at, slice):
            at = np.arange(at.start, at.stop, dtype=np.int64)
        out = np.empty(len(at), np.uint8 if marks else self.dtype)
        place_N = np.searchsorted(self.starts, at, side="right") - 1
        for place in np.unique(place_N).tolist():
            here = place_N == place
            tokens, marked = self._arrays(place)
            inside = at[here] - self.starts[place]
            out[here] = tokens[inside] if not marks else 1 if marked is None else marked[inside]
        return out

    def _arrays(self, place: int) -> Arrays:
        source = self._bytes_of(place)
        known = self._open.get(place)
        if known is not None and known[0] is source:
            return known[1]
        shard = self.index.shards[place]
        if isinstance(source, Unreadable):
            arrays: Arrays = np.zeros(shard.tokens, self.dtype), np.zeros(shard.tokens, np.uint8)
        else:
            little, size = self.dtype.newbyteorder("<"), shard.tokens * self.dtype.itemsize
            if isinstance(source, Path):
                content = np.memmap(source, np.uint8, mode="r")
            else:
                content = np.frombuffer(source, np.uint8)
            arrays = content[:size].view(little), content[size:] if self.index.marked else None
        if len(self._open) >= _MORE:
            self._open.pop(next(iter(self._open)))
        self._open[place] = source, arrays
        return arrays


class _Marks:
    def __init__(self, tokens: ShardTokens) -> None:
        self._tokens = tokens

    def __getitem__(self, at: np.ndarray | slice) -> np.ndarray:
        return self._tokens._taken(at, marks=True)
