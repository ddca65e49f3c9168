"""Which ranks hold which experts, by how many rows they get. Plain Python.

An order lists the experts of a layer, those of the first rank first, as many on each. A rank's are in the order of
their numbers. Only where an expert lives changes: which rows it sees, and in which order, does not.

See: DeepSeek's EPLB, `balanced_packing` (MIT). Copies of experts that get most rows, which it has too, are not made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 0.05
"""Share of the fullest ranks' rows that an order must save."""

Orders = tuple[tuple[int, ...], ...]
"""Of each layer with experts."""


def balanced(load: Sequence[float], ranks: int) -> tuple[int, ...]:
    """An order in which ranks have about the same number of rows: experts go, the fullest first, to the rank with the
    fewest rows that has room.

    Args:
        load: rows of each expert.
        ranks: that hold as many each.

    Example:
        >>> balanced([9.0, 8.0, 1.0, 2.0], 2)
        (0, 2, 1, 3)
    """
    room, rows = [len(load) // ranks] * ranks, [0.0] * ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(load)), key=lambda expert: -load[expert]):
        rank = min((rank for rank in range(ranks) if room[rank]), key=lambda rank: (rows[rank], rank))
        held[rank].append(expert)
        room[rank] -= 1
        rows[rank] += load[expert]
    return tuple(expert for one in held for expert in sorted(one))


def fullest(load: Sequence[float], order: Sequence[int], ranks: int) -> float:
    """Rows of the rank that has most, in those of the mean.

    Example:
        >>> fullest([9.0, 8.0, 1.0, 2.0], (0, 1, 2, 3), 2), fullest([9.0, 8.0, 1.0, 2.0], (0, 2, 1, 3), 2)
        (1.7, 1.0)
    """
    each, total = len(order) // ranks, sum(load)
    rows = [sum(load[expert] for expert in order[start : start + each]) for start in range(0, len(order), each)]
    return max(rows) * ranks / total if total else 1.0


def orders_of(flat: Sequence[int], num_experts: int) -> Orders:
    """The order of each layer, from those of all layers one after another."""
    return tuple(tuple(flat[start : start + num_experts]) for start in range(0, len(flat), num_experts))


@dataclass(frozen=True)
class ExpertMove:
    """Another order of the experts of each layer, and what it is for."""

    orders: Orders
    before: float
    """Rows of the fullest ranks, over the layers, in those of the mean."""
    after: float

    @property
    def gain(self) -> float:
        """Share of the fullest ranks' rows that it saves."""
        return 1 - self.after / self.before


def worth(
    loads: Sequence[Sequence[float]], now: Orders, ranks: int, *, steps_left: int, step_s: float, move_s: float
) -> ExpertMove | None:
    """Balanced orders, where they save enough rows, and the steps that are left, if all of a step waited for these
    rows, more than twice what the move takes; None otherwise.

    Args:
        loads: rows of each expert, by layer.
        now: the present orders.
        ranks: that hold experts.
        steps_left: of the run.
        step_s: seconds of a step.
        move_s: seconds of the move.
    """
    orders = tuple(balanced(load, ranks) for load in loads)
    before, after = (
        sum(fullest(load, order, ranks) for load, order in zip(loads, each, strict=True)) / len(loads)
        for each in (now, orders)
    )
    move = ExpertMove(orders, before, after)
    return move if move.gain >= LEAST and steps_left * step_s * move.gain > 2 * move_s else None
