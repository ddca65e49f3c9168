"""Advice on a plan: the faster way beside it, changes that gain time, why memory is idle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.core.config.change_recipe import on_machine, value_of
from tilewright.core.config.load import Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.planner.advice.recipe_changes import WORTH, Change, cheapest_changes, idle_memory
from tilewright.planner.decide import decide, free_planner
from tilewright.planner.plan import OF_A_LAYER, Plan
from tilewright.planner.site import Site
from tilewright.training.planning.does_not_fit import changes_to_fit, replanned
from tilewright.training.planning.plan_request import PlanRequest

SAME = 1 + 1e-3
"""Seconds that are equal: the solver's answers are a ten-thousandth apart (`planner.GAP`)."""


@dataclass(frozen=True)
class Advice:
    """Texts about a plan beside its numbers."""

    faster: Change | None = None
    """The fastest plan, where it is faster than what `train` does, with the settings with which `train` runs it; none
    where layers differ in what settings say of all of them: then there is a plan file."""
    changes: Sequence[Change] = ()
    idle: str = ""
    """Why memory stays idle; empty where it does not."""


NOTHING = Advice()
IN_A_FILE = "the plan that --fastest --out plan.toml writes and --memory.plan plan.toml executes"


def advice(loaded: Loaded, site: Site, found: Plan, request: PlanRequest) -> Advice:
    """Advise on a plan: changes that make it faster, or that make a recipe fit which does not."""
    if request.largest or found.state == "not known":
        return NOTHING
    if found.state == "does not fit":
        return Advice(changes=changes_to_fit(loaded.recipe, site))
    replan = replanned(loaded, site, request.how)
    changes = cheapest_changes(found.recipe, found.budget, found, replan)
    faster = None if request.fastest else find_faster(loaded, site, found)
    return Advice(faster, changes, "" if faster else idle_memory(free_planner(loaded, site), found))


def find_faster(loaded: Loaded, site: Site, found: Plan) -> Change | None:
    """Advise the fastest plan beside the one that `train` takes; None if it gains too little."""
    best = decide(loaded, site, "fastest")
    if not best.accepted or best.tokens_per_s <= WORTH * found.tokens_per_s:
        return None
    recipe = on_machine(loaded, site.machine).recipe
    replan = replanned(loaded, site, "least_change")
    for each in as_settings(best, recipe):
        typed = replan(each, best.budget) if each else None
        if typed is not None and typed.step_s <= SAME * best.step_s:
            return Change(each, not best.narrowed, best)
    return Change(
        {},
        not best.narrowed,
        best,
        "the plan that --fastest --out plan.toml writes and --memory.plan plan.toml executes",
    )


def as_settings(plan: Plan, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Write a plan as settings to type. Where `train` finds the rest itself, only those that hold for all layers are
    written, or none."""
    settings = {name: value for name, value in plan.settings().items() if value_of(recipe, name) != value}
    of_all = {name: value for name, value in settings.items() if name not in OF_A_LAYER}
    forms = settings, of_all, {}
    yield from (each for number, each in enumerate(forms) if each not in forms[:number])
