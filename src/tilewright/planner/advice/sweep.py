"""Many plans of one recipe: the deepest model that fits, and seconds against memory."""

from dataclasses import replace

from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner


def largest(planner: Planner, budget: Budget) -> Plan | None:
    """The plan of the deepest model of this shape that fits; None where not even one layer a class does."""
    shape = planner.shape(planner.recipe)
    least = len(shape.classes)
    low, high = least - 1, max(2 * shape.num_layers, least)
    found: dict[int, Plan] = {}

    def fits(num_layers: int) -> bool:
        plan = planner.with_layers(num_layers).plan(budget)
        if plan is not None:
            found[num_layers] = plan
        return plan is not None

    while high < 4096 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return found.get(low)


def pareto(planner: Planner, budget: Budget, points: int = 6) -> list[Plan]:
    """Fastest plans at several device budgets, from the least that fits to the budget itself."""
    least = planner.smallest(budget)
    found: list[Plan] = []
    if least is None:
        return found
    low = min(1.01 * least.least_device, budget.device)
    for i in range(points):
        device = low + (budget.device - low) * i / (points - 1)
        plan = planner.plan(replace(budget, device=device))
        if plan is not None:
            found.append(plan)
    return found
