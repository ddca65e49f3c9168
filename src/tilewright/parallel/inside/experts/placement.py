"""Which ranks hold which experts, by how many rows they get. Plain Python.

An order lists the experts that ranks hold of a layer, those of the first rank first, as many on each. A rank's are in
the order of their numbers. Where each is held once, only where an expert lives changes: which rows it sees, and in
which order, does not. Of redundant experts several ranks hold a copy, each of which gets its share of the rows.

See: DeepSeek's EPLB, `replicate_experts` and `balanced_packing` (MIT).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 0.05
"""Share of the fullest ranks' rows that an order must save."""

Orders = tuple[tuple[int, ...], ...]
"""Of each layer with experts."""


def by_rank(order: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """The experts placed on each rank by this order.

    Example:
        >>> by_rank((0, 2, 1, 3), 2), by_rank((), 2)
        (((0, 2), (1, 3)), ((), ()))
    """
    each = len(order) // ranks
    return tuple(tuple(order[rank * each : (rank + 1) * each]) for rank in range(ranks))


def usual(num_experts: int, ranks: int, redundant: int = 0) -> tuple[int, ...]:
    """Place experts on ranks before any rows are counted: in the order of their numbers, with copies of the next rank's
    first ones.

    Args:
        num_experts: of a layer.
        ranks: that hold as many each.
        redundant: how many more each holds.

    Example:
        >>> usual(4, 2), usual(4, 2, redundant=1)
        ((0, 1, 2, 3), (0, 1, 2, 0, 2, 3))
    """
    each = num_experts // ranks
    held = ((rank * each + place for place in range(each + redundant)) for rank in range(ranks))
    return tuple(expert for one in held for expert in sorted(place % num_experts for place in one))


def balanced(load: Sequence[float], ranks: int, redundant: int = 0) -> tuple[int, ...]:
    """Place experts so that ranks have about the same number of rows. First the copies of an expert go to the ranks
    with most room (so that there are enough ranks for all copies), and among these to those with the fewest rows. Then
    the other experts follow, the fullest first, each to the rank with the fewest rows that has room.

    Args:
        load: rows of each expert.
        ranks: that hold as many each.
        redundant: how many more experts each rank holds; all ranks have other ones at most.

    Example:
        >>> balanced([9.0, 8.0, 1.0, 2.0], 2), balanced([9.0, 8.0, 1.0, 2.0], 2, redundant=1)
        ((0, 2, 1, 3), (0, 1, 3, 0, 1, 2))
    """
    copies = _copies(load, ranks, ranks * redundant)
    room, rows = [len(load) // ranks + redundant] * ranks, [0.0] * ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(load)), key=lambda expert: (copies[expert] == 1, -load[expert] / copies[expert])):
        alone, free = copies[expert] == 1, [rank for rank in range(ranks) if room[rank]]
        free.sort(key=lambda rank: (0 if alone else -room[rank], rows[rank], rank))
        for rank in free[: copies[expert]]:
            held[rank].append(expert)
            room[rank] -= 1
            rows[rank] += load[expert] / copies[expert]
    return tuple(expert for one in held for expert in sorted(one))


def _copies(load: Sequence[float], ranks: int, more: int) -> list[int]:
    """Count the ranks that hold each expert: one more copy, again and again, for the expert whose copies get most
    rows."""
    copies = [1] * len(load)
    for _ in range(more):
        free = (expert for expert, number in enumerate(copies) if number < ranks)
        copies[max(free, key=lambda expert: (load[expert] / copies[expert], -copies[expert], -expert))] += 1
    return copies


def fullest(load: Sequence[float], order: Sequence[int], ranks: int) -> float:
    """Rows of the fullest rank under a placement of experts, in those of the mean.

    Example:
        >>> fullest([9.0, 8.0, 1.0, 2.0], (0, 1, 2, 3), 2), fullest([9.0, 8.0, 1.0, 2.0], (0, 2, 1, 3), 2)
        (1.7, 1.0)
    """
    copies, total = Counter(order), sum(load)
    rows = [sum(load[expert] / copies[expert] for expert in held) for held in by_rank(order, ranks)]
    return max(rows) * ranks / total if total else 1.0


def orders_of(flat: Sequence[int], num_held: int) -> Orders:
    """The placement of each layer's experts as an order, from those of all layers one after another, each of `num_held`
    experts."""
    return tuple(tuple(flat[start : start + num_held]) for start in range(0, len(flat), num_held))


@dataclass(frozen=True)
class ExpertMove:
    """Another order of the experts of each layer, and what it is for."""

    orders: Orders
    before: float
    """Rows of the fullest ranks, over the layers, in those of the mean."""
    after: float

    @property
    def gain(self) -> float:
        """The share of the fullest ranks' rows that another placement of experts saves."""
        return 1 - self.after / self.before


def worth(
    loads: Sequence[Sequence[float]], now: Orders, ranks: int, *, steps_left: int, step_s: float, move_s: float
) -> ExpertMove | None:
    """Return balanced placements of experts with as many copies if they are worth the move, else None. The steps that
    are left must save more than twice what the move takes, as if all of a step waited for these rows.

    Args:
        loads: rows of each expert, by layer.
        now: the present orders.
        ranks: that hold experts.
        steps_left: of the run.
        step_s: seconds of a step.
        move_s: seconds of the move.
    """
    orders = tuple(balanced(load, ranks, (len(own) - len(load)) // ranks) for load, own in zip(loads, now, strict=True))
    before, after = (
        sum(fullest(load, order, ranks) for load, order in zip(loads, each, strict=True)) / len(loads)
        for each in (now, orders)
    )
    move = ExpertMove(orders, before, after)
    return move if move.gain >= LEAST and steps_left * step_s * move.gain > 2 * move_s else None
