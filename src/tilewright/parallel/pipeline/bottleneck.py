"""A list cut into parts whose most expensive one costs as little as it can. No torch."""

from collections.abc import Sequence
from math import ceil


def cut_evenly(costs: Sequence[int], parts: int) -> tuple[int, ...]:
    """How many entries each part has, in their order, at least one: no other cut has a cheaper most expensive part.

    The limit is found by halving: whether parts under it are few enough is one pass over the entries.

    Args:
        costs: of the entries, whole numbers of 0 or more, at least as many as parts.
        parts: 1 or more.

    Example:
        >>> cut_evenly((5, 1, 1, 1, 4, 2), parts=3), cut_evenly((1, 1, 9), parts=3)
        ((2, 3, 1), (1, 1, 1))
    """
    low, high = max(max(costs), ceil(sum(costs) / parts)), sum(costs)
    while low < high:
        limit = (low + high) // 2
        if len(_filled(costs, limit)) <= parts:
            high = limit
        else:
            low = limit + 1
    return _in_parts(_filled(costs, low), parts)


def _filled(costs: Sequence[int], limit: int) -> list[int]:
    """Entries of parts that are each filled up to the limit."""
    found, cost = [0], 0
    for one in costs:
        if cost + one > limit and found[-1]:
            found.append(0)
            cost = 0
        found[-1] += 1
        cost += one
    return found


def _in_parts(counts: list[int], parts: int) -> tuple[int, ...]:
    """More parts, out of those with most entries: none of them costs more than before."""
    while len(counts) < parts:
        place = max(range(len(counts)), key=counts.__getitem__)
        half = counts[place] // 2
        counts[place : place + 1] = [counts[place] - half, half]
    return tuple(counts)
