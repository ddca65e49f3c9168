"""Which micro-batch of which rank gets each document of a step: the seam between the data's stream and a balancer.

All ranks know the lengths of all documents of a step, so each computes the whole assignment and takes its own part:
nothing is exchanged. `Stream.assign_with` sets the function; by default it is `in_stream_order`.
No tensors in here: the stream calls it in the thread that reads ahead.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Assignment = tuple[tuple[np.ndarray, ...], ...]
"""By rank that reads other documents, and by micro-batch of it: indices of the step's documents, int64, in the order in
which they stand behind each other. As many micro-batches on each rank; an empty one has no targets."""


def any_count(microbatches: int) -> bool:
    """True if an assignment of documents, of a step without a schedule, can have so many micro-batches."""
    return microbatches > 0


@dataclass(frozen=True)
class Room:
    """The room of a step's micro-batches for documents; the same on all ranks."""

    ranks: int
    """That read different documents."""
    tokens: int
    """Most of them in a micro-batch: what memory is planned for. No document has more."""
    takes: Callable[[int], bool] = any_count
    """Whether a rank can run so many micro-batches in a step; of a pipeline `Pipeline.takes`."""

    def next_count(self, least: int) -> int:
        """The fewest micro-batches per rank that an assignment may have, at least so many."""
        return next(count for count in range(max(1, least), 4 * (least + 64)) if self.takes(count))


Assign = Callable[[np.ndarray, Room], Assignment]
"""From the tokens of each document of a step, int64 [N] in stream order, and what is allowed, to their places.

A pure function, equal on all ranks: what it knows beside its arguments is what all ranks have agreed on. It is called a
step or more ahead of the step, once per step, in another thread."""


def in_stream_order(lengths_N: np.ndarray, room: Room) -> Assignment:
    """Assign documents to micro-batches in their order, as many in each as fit. There are as few micro-batches as
    possible, and the longest is as short as it can be with so many. Micro-batch i goes to rank i modulo their number.

    Args:
        lengths_N: tokens of each document, each from 1 to `room.tokens`.
        room: what is allowed.

    Example:
        >>> [[m.tolist() for m in rank] for rank in in_stream_order(np.array([5, 4, 3, 3, 2, 1]), Room(2, 10))]
        [[[0, 1]], [[2, 3, 4, 5]]]
    """
    ends_N = np.cumsum(lengths_N)
    count = room.next_count(-(-_num_parts(ends_N, room.tokens) // room.ranks))
    low, high = int(lengths_N.max(initial=1)), room.tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_parts(ends_N, middle) <= count * room.ranks else (middle + 1, high)
    bounds = part_bounds(ends_N, low)
    bounds += [len(lengths_N)] * (count * room.ranks + 1 - len(bounds))
    return tuple(
        tuple(np.arange(bounds[part], bounds[part + 1]) for part in range(rank, count * room.ranks, room.ranks))
        for rank in range(room.ranks)
    )


def part_bounds(ends_N: np.ndarray, most: int) -> list[int]:
    """First document of each part of at most `most` tokens, filled one after the other, and the end.

    Args:
        ends_N: running sums of the documents' tokens, none of which has more than `most`.
        most: tokens of a part.
    """
    bounds, before = [0], 0
    while bounds[-1] < len(ends_N):
        bounds.append(int(np.searchsorted(ends_N, before + most, side="right")))
        before = int(ends_N[bounds[-1] - 1])
    return bounds


def check_assignment(assignment: Assignment, lengths_N: np.ndarray, room: Room) -> None:
    """Check an assignment: raise where documents would be lost, read twice, or not fit.

    Raises:
        AssertionError: an assignment that no balancer may give.
    """
    counts = {len(rank) for rank in assignment}
    if len(assignment) != room.ranks or len(counts) != 1 or not room.takes(*counts):
        raise AssertionError(f"{[len(rank) for rank in assignment]} micro-batches by rank, for {room}")
    parts = [part for rank in assignment for part in rank]
    if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(lengths_N))):
        raise AssertionError(f"not each of {len(lengths_N)} documents once")
    most = max(int(lengths_N[part].sum()) for part in parts)
    if most > room.tokens:
        raise AssertionError(f"a micro-batch of {most} tokens, {room.tokens} are allowed")


def _num_parts(ends_N: np.ndarray, most: int) -> int:
    return len(part_bounds(ends_N, most)) - 1
