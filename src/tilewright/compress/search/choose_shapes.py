"""The shapes of least predicted loss under limits, by an integer program: one choice at each place.

Losses add up, and so do costs: the rise of a shape is the sum of what its replacements cost alone. It is a prediction,
which the best shapes are trained on to check.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.compress.search.library.layer_parts import PartPlace
from tilewright.compress.search.library.replacement_choices import NONE, OWN
from tilewright.compress.search.table.choice_costs import Costs
from tilewright.core.integer_program import Column, LinearRow, minimise


@dataclass(frozen=True)
class Option:
    """A choice at a place.

    Args:
        place: of the part.
        name: of the choice.
        rise: of the held-out loss with it alone in place, relative; of the run's own part 0.
        costs: by measure.
    """

    place: PartPlace
    name: str
    rise: float
    costs: Costs

    @property
    def attends(self) -> bool:
        """True if an option to choose looks at other tokens."""
        return self.place.part == "attention" and self.name != NONE


@dataclass(frozen=True)
class ChosenShape:
    """One option at each place, in the order of places."""

    options: tuple[Option, ...]

    @property
    def rise(self) -> float:
        """Predicted rise of the loss of a chosen shape, relative."""
        return sum(option.rise for option in self.options)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the choices of a chosen shape, in the order of places."""
        return tuple(option.name for option in self.options)

    def cost(self, measure: str, rest: Costs) -> float:
        """Predicted cost of the whole decoder of a chosen shape."""
        return rest[measure] + sum(option.costs[measure] for option in self.options)  # type: ignore[index]

    def to_json(self, rest: Costs) -> dict[str, object]:
        """The chosen shape for the record."""
        return {
            "choices": {str(option.place): option.name for option in self.options},
            "rise": self.rise,
            "costs": {measure: self.cost(measure, rest) for measure in rest},
        }


def best_shapes(
    options: Sequence[Option], rest: Costs, limits: Mapping[str, float], number: int, distance: int
) -> list[ChosenShape]:
    """Choose the best shapes within limits, the best first; empty where there are none.

    Args:
        options: of all places.
        rest: what no choice changes.
        limits: by measure, in its own unit.
        number: of shapes, at most.
        distance: places at which each differs from those before, at least.

    Raises:
        OutOfTime: the solver was stopped and had found nothing.
    """
    found: list[ChosenShape] = []
    rows = [*_one_each(options), *(_limit(options, rest, name, limit) for name, limit in limits.items())]
    places = len({option.place for option in options})
    while len(found) < number:
        chosen = _solve(options, [option.rise for option in options], rows)
        if chosen is None:
            break
        found.append(chosen)
        same = {i: 1.0 for i, option in enumerate(options) if option in chosen.options}
        rows.append(LinearRow(same, upper=places - distance))
    return found


def nearest_shape(
    options: Sequence[Option], rest: Costs, limits: Mapping[str, float]
) -> tuple[ChosenShape, dict[str, float]]:
    """Choose the shape nearest to limits that no shape meets: the sum of its excesses, as shares of the limits, is
    least.

    Returns:
        The shape, and its cost as a share of each limit.
    """
    first = len(options)
    excess = {name: first + i for i, name in enumerate(limits)}
    rows = list(_one_each(options))
    for name, limit in limits.items():
        row = _limit(options, rest, name, limit)
        rows.append(LinearRow({**row.entries, excess[name]: -1.0}, upper=row.upper))
    costs = [0.0] * len(options)
    chosen = _solve(options, costs, rows, excess=len(limits))
    assert chosen is not None  # any decoder has some excess
    return chosen, {name: chosen.cost(name, rest) / limit for name, limit in limits.items()}


def _one_each(options: Sequence[Option]) -> list[LinearRow]:
    rows = []
    for place in dict.fromkeys(option.place for option in options):
        own = {i: 1.0 for i, option in enumerate(options) if option.place == place}
        rows.append(LinearRow(own, 1, 1))
    return [*rows, LinearRow({i: 1.0 for i, option in enumerate(options) if option.attends}, lower=1)]


def _limit(options: Sequence[Option], rest: Costs, name: str, limit: float) -> LinearRow:
    """Rows of the program that chooses shapes, as shares of a limit, so that all are of one size."""
    shares = {i: option.costs[name] / limit for i, option in enumerate(options)}  # type: ignore[index]
    return LinearRow(shares, upper=1 - rest[name] / limit)  # type: ignore[index]


def _solve(
    options: Sequence[Option], costs: Sequence[float], rows: Sequence[LinearRow], excess: int = 0
) -> ChosenShape | None:
    columns = [Column(cost, upper=1, whole=True) for cost in costs] + [Column(1.0)] * excess
    solution = minimise(columns, rows, gap=0)
    if solution is None:
        return None
    return ChosenShape(
        tuple(o for o, value in zip(options, solution.values[: len(options)], strict=True) if value > 0.5)
    )


def uniform_shapes(options: Sequence[Option]) -> list[ChosenShape]:
    """List the uniform shapes to choose from: one choice for all attentions and one for all FFNs; the run's own shape
    is one of them."""
    by_part: dict[str, dict[str, dict[PartPlace, Option]]] = {}
    for option in options:
        by_part.setdefault(option.place.part, {}).setdefault(option.name, {})[option.place] = option
    places = sorted({option.place for option in options})
    whole = []
    for names in by_part.values():
        number = len(names[OWN])
        whole.append([found for found in names.values() if len(found) == number])
    shapes = []
    for combination in itertools.product(*whole):
        found = {place: option for chosen in combination for place, option in chosen.items()}
        shape = ChosenShape(tuple(found[place] for place in places))
        if any(option.attends for option in shape.options):
            shapes.append(shape)
    return shapes


def within(shape: ChosenShape, rest: Costs, limits: Mapping[str, float]) -> bool:
    """True if the predicted costs of a chosen shape hold all limits."""
    return all(shape.cost(name, rest) <= limit for name, limit in limits.items())
