"""The decoder's key/value cache: with it a new token runs alone.

Grouped-query attention keeps rotated keys and values; latent attention keeps the narrow latent and the rotated key
that all heads share, and expands the latent again for each token. Memory is taken once, for the asked length; for a
window of positions that is less, for two windows: what no position sees any longer is left behind when they are full.

Rows that were begun at different times, each with a cache of its own, run one token together (`JoinedCache`): what has
weights runs once for all of them, attention runs for each row on its own cache. So nothing is padded or copied when a
row joins or leaves.

Legend: B rows  S new positions  T positions so far  R rotary width.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
Attention = Callable[..., Tensor]
Recurrence = Callable[..., tuple[Tensor, Tensor]]
"""The state before some positions, or None, and what they bring -> their results, and the state behind them."""


class LayerCache:
    """The part of one layer. Written by its attention; see `DecoderCache`."""

    def __init__(self, owner: "DecoderCache"):
        self.owner = owner
        self._kept: list[Tensor] = []
        self._first = 0
        """Position of the first row of what is kept: more than 0 where a window has left earlier ones behind."""
        self._ahead: tuple[int, list[Tensor]] | None = None
        """End and last positions of a pass that had no room here. They count once the owner has counted the pass."""
        self._window = 0
        self._states: list[tuple[int, Tensor]] = []
        """Of linear attention: the number of positions that a state has seen, and the state; at most two."""

    def extend(self, *new: Tensor, window: int = 0) -> Sequence[Tensor]:
        """Append the tensors [B, S, ...] of new positions to a layer's cache. Returns those of all positions so far [B,
        T, ...], or of all that a later position may see.

        Args:
            window: positions that each one sees at most, the same in each call; 0: all.
        """
        count = new[0].shape[1]
        start, end = self.owner.length, self.owner.length + count
        if not self._has_room(new, window):
            past = [kept.narrow(1, 0, start - self._first) for kept in self._kept]
            joined = [torch.cat(pair, dim=1) for pair in zip(past, new, strict=True)]
            # What is kept stays until the pass is counted: one that fails leaves the cache as it was.
            self._ahead = end, [t.narrow(1, t.shape[1] - window + 1, window - 1).clone() for t in joined]
            return joined
        for kept, tensor in zip(self._kept, new, strict=True):
            kept.narrow(1, start - self._first, count).copy_(tensor)
        return [kept.narrow(1, 0, end - self._first) for kept in self._kept]

    def reserve(self, *new: Tensor, window: int = 0) -> Sequence[Sequence[Tensor]]:
        """Reserve a place for one new position of each row in a layer's cache. Returns for each row the tensors of the
        positions that it sees, [T, ...]; the last one is its own, which the caller writes.

        Args:
            new: [B, 1, ...], read for their shapes, dtypes and devices.
            window: see `extend`.
        """
        has_room = self._has_room(new, window)
        assert has_room, "a window has room for one position"
        end = self.owner.length + 1 - self._first
        first = max(end - window, 0) if window else 0
        return [[kept[row].narrow(0, first, end - first) for kept in self._kept] for row in range(len(new[0]))]

    def _has_room(self, new: Sequence[Tensor], window: int) -> bool:
        """Make room in a layer's cache: take memory, or leave positions behind, for what is new; False where it is more
        than a window's memory."""
        count = new[0].shape[1]
        start, end = self.owner.length, self.owner.length + count
        self.owner.check_room(len(new[0]), count)
        if not self._kept:
            self._window = window
            size = min(self.owner.capacity, 2 * window) if window else self.owner.capacity
            self._kept = [t.new_empty((len(t), size, *t.shape[2:])) for t in new]
        if self._ahead is not None:
            self._take_ahead()
        if end - self._first > self._kept[0].shape[1]:
            self._move_up(max(self._first, start - window + 1), start)
        return end - self._first <= self._kept[0].shape[1]

    def _take_ahead(self) -> None:
        """Take ahead in a layer's cache: put what had no room in the place of what is kept, if its pass was counted;
        else drop it."""
        assert self._ahead is not None
        (end, tensors), self._ahead = self._ahead, None
        if self.owner.length < end:
            return
        self._first = end - tensors[0].shape[1]
        for kept, tensor in zip(self._kept, tensors, strict=True):
            kept.narrow(1, 0, tensor.shape[1]).copy_(tensor)

    def _move_up(self, first: int, end: int) -> None:
        """Drop the positions before `first` from a layer's cache, and move the others up."""
        for kept in self._kept:
            kept.narrow(1, 0, end - first).copy_(kept.narrow(1, first - self._first, end - first).clone())
        self._first = first

    def attend(self, attention: Attention, q_BSHD: Tensor, *new: Tensor, window: int = 0) -> Tensor:
        """Run `attention` with a layer's cache: for queries of the new positions, and the tensors [B, S, ...] of all
        positions that they may see."""
        return attention(q_BSHD, *self.extend(*new, window=window))

    def recur(self, attention: Recurrence, *new: Tensor) -> Tensor:
        """Run recurrent `attention` from a layer's cached state (None: there is none) over the new positions, and cache
        the state behind them. The earlier state stays until the pass is counted: a pass that fails may be run again."""
        start, end = self.owner.length, self.owner.length + new[0].shape[1]
        self.owner.check_room(len(new[0]), new[0].shape[1])
        self._states = [(seen, state) for seen, state in self._states if seen == start]
        out, state = attention(self._states[0][1] if self._states else None, *new)
        self._states.append((end, state))
        return out

    @property
    def num_bytes(self) -> int:
        """Bytes that a layer's cache reserves."""
        ahead = self._ahead[1] if self._ahead is not None else []
        states = [state for _, state in self._states]
        return _bytes((*self._kept, *ahead, *states))

    def growth(self, chunk: int) -> tuple[int, float]:
        """Growth of the decoder's cache of a layer, at most; see `protocols.KeyValueCache.growth`: two windows, a third
        while a pass of more than one is counted, and the states before and behind a pass."""
        most, passed = 2 * self._window or math.inf, 0
        if self._window and chunk > self._window + 1:
            passed = -(-_bytes(self._kept) // 2)
        return _bytes(self._kept) + passed + 2 * _bytes([state for _, state in self._states[-1:]]), most


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(math.prod(t.shape) * t.element_size() for t in tensors)


class DecoderCache:
    """The caches of all layers of one decoder. Implements `protocols.KeyValueCache`.

    Args:
        num_layers: of the decoder.
        rows: B, the same in each call.
        capacity: most positions of a row.

    Example:
        >>> cache = DecoderCache(num_layers=1, rows=1, capacity=4)
        >>> cache.layers[0].extend(torch.ones(1, 3, 2))[0].shape, cache.length
        (torch.Size([1, 3, 2]), 0)
        >>> cache.advance(3); cache.layers[0].extend(torch.ones(1, 1, 2))[0].shape
        torch.Size([1, 4, 2])
    """

    takes_pieces = True
    """See `protocols.KeyValueCache`."""

    def __init__(self, num_layers: int, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        self.length = 0
        """Positions held. Advanced when all layers have run, so a pass that fails leaves the cache as it was."""
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self._angles: Angles | None = None

    def angles(self, num_new: int, make: Callable[[Tensor], Angles], device: torch.device) -> Angles:
        """Cosine and sine [1, S, R/2] of the next positions of the cache. `make` computes those of position ids [1, T].
        It is called once, for all positions that there is room for: for each token it would take longer than a
        layer."""
        if self._angles is None:
            self._angles = make(torch.arange(self.capacity, device=device)[None])
        cos, sin = self._angles
        return cos.narrow(1, self.length, num_new), sin.narrow(1, self.length, num_new)

    def check_room(self, rows: int, positions: int) -> None:
        """Raise where the next `positions` of `rows` rows do not fit into the decoder's cache.

        Raises:
            ValueError: other rows than the cache is for, or more positions than are left.
        """
        if rows != self.rows or self.length + positions > self.capacity:
            raise ValueError(
                f"a cache for {self.rows} rows of {self.capacity} positions, {self.length} of them used, cannot "
                f"take {positions} more of {rows} rows"
            )

    def advance(self, positions: int) -> None:
        """Count positions that all layers have written to the decoder's cache."""
        self.length += positions

    def joined(self, rest: Sequence["DecoderCache"], width: int) -> "JoinedCache":
        """One decoder's cache of several, each of one row; see `protocols.KeyValueCache`."""
        return JoinedCache((self, *rest), width)

    def growth(self, chunk: int) -> list[tuple[int, float]]:
        """The most bytes of each layer of the decoder's cache: see `protocols.KeyValueCache.growth`."""
        return [layer.growth(chunk) for layer in self.layers]

    @property
    def num_bytes(self) -> int:
        """Bytes that the decoder's cache of all layers reserves."""
        return sum(layer.num_bytes for layer in self.layers)


class JoinedCache:
    """Caches of one row each, for passes of one token of each row. Implements `protocols.KeyValueCache`.

    Args:
        caches: of the rows, in the order of the ids.
        width: rows that a pass has, at least as many; those behind the caches' own repeat the first row and are kept
            nowhere. With one width each row's values are the same bits whatever the other rows are, where the
            matmuls of the machine give equal rows equal bits.
    """

    takes_pieces = False
    """See `protocols.KeyValueCache`."""

    def __init__(self, caches: Sequence[DecoderCache], width: int):
        self._caches, self._width = caches, max(width, len(caches))
        self.layers = [JoinedLayer(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)]

    @property
    def length(self) -> int:
        """Positions of the longest row in joined caches."""
        return max(cache.length for cache in self._caches)

    @property
    def num_bytes(self) -> int:
        """Bytes that joined caches of all rows reserve."""
        return sum(cache.num_bytes for cache in self._caches)

    def angles(self, num_new: int, make: Callable[[Tensor], Angles], device: torch.device) -> Angles:
        """Cosine and sine [B, 1, R/2] of the next position of each row of joined caches."""
        pairs = [cache.angles(num_new, make, device) for cache in self._caches]
        pairs += pairs[:1] * (self._width - len(pairs))
        cos, sin = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return cos, sin

    def check_room(self, rows: int, positions: int) -> None:
        """Check room in joined caches: raise where a pass has other rows or more than one token of each, or a row has
        no room.

        Raises:
            ValueError: so it is.
        """
        if rows != self._width or positions != 1:
            raise ValueError(f"{self._width} rows take one token each together, not {positions} of {rows} rows")
        for cache in self._caches:
            cache.check_room(1, 1)

    def advance(self, positions: int) -> None:
        """Count positions that all layers have written to joined caches."""
        for cache in self._caches:
            cache.advance(positions)


class JoinedLayer:
    """The part of one layer; see `JoinedCache`."""

    def __init__(self, layers: Sequence[LayerCache]):
        self._layers = layers

    def attend(self, attention: Attention, q_BSHD: Tensor, *new: Tensor, window: int = 0) -> Tensor:
        """Run attention with a layer of joined caches, row by row: see `LayerCache.attend`."""
        rows = [
            layer.attend(attention, q_BSHD[i : i + 1], *(tensor[i : i + 1] for tensor in new), window=window)
            for i, layer in enumerate(self._layers)
        ]
        return torch.cat([*rows, *rows[:1] * (len(q_BSHD) - len(rows))])

    def reserve(self, *new: Tensor, window: int = 0) -> Sequence[Sequence[Tensor]]:
        """Reserve a place for one new position of each row that has a cache, in a layer of joined caches; see
        `LayerCache.reserve`."""
        rows = enumerate(self._layers)
        return [layer.reserve(*(tensor[i : i + 1] for tensor in new), window=window)[0] for i, layer in rows]

    def recur(self, attention: Recurrence, *new: Tensor) -> Tensor:
        """Run recurrent attention with a layer of joined caches, row by row: see `LayerCache.recur`."""
        rows = [layer.recur(attention, *(tensor[i : i + 1] for tensor in new)) for i, layer in enumerate(self._layers)]
        return torch.cat([*rows, *rows[:1] * (len(new[0]) - len(rows))])
