"""Many plans of one recipe: the deepest model that fits, and seconds against memory."""

from dataclasses import replace

from tilewright.core.config.load import Loaded
from tilewright.planner.decide import How, decide, free_planner
from tilewright.planner.plan import Plan
from tilewright.planner.site import Site


def largest(loaded: Loaded, site: Site, how: How) -> Plan | None:
    """Find the deepest model of this shape that fits, and decide for it; None if not even one layer per class does.

    Raises:
        UnknownFitError: the model cannot be traced.
    """
    shape = site.planner(loaded.recipe).shape(loaded.recipe).known()
    least = len(shape.classes)
    low, high = least - 1, max(2 * shape.num_layers, least)
    found: dict[int, Plan] = {}

    def fits(num_layers: int) -> bool:
        plan = decide(loaded, site, how, num_layers=num_layers)
        if plan.accepted:
            found[num_layers] = plan
        return plan.accepted

    while high < 4096 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return found.get(low)


def pareto(loaded: Loaded, site: Site, points: int = 6) -> list[Plan]:
    """Sweep device budgets: the fastest plan at each, from the least that fits to the budget itself."""
    planner = free_planner(loaded, site)
    budget = site.budget(planner.recipe, disk=site.may_use_disk(planner.recipe))
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
