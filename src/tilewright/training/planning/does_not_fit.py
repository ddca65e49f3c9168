"""Errors of runs that do not fit, or of which it is not known, each with changes that the same command accepts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewright.core.config.change_recipe import on_machine
from tilewright.core.config.load import Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import FitError, UnknownFitError
from tilewright.core.units import format_bytes
from tilewright.planner.advice.describe_plan import no_plan
from tilewright.planner.advice.recipe_changes import Change, cheapest_changes, to_fit
from tilewright.planner.decide import How, decide, free_planner, typed, typed_too, user_settings
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import FORMAT_FIELDS, Planner
from tilewright.planner.site import Site


def changes_to_fit(recipe: Recipe, site: Site) -> tuple[Change, ...]:
    """The cheapest changes that make a recipe fit which does not; none for a model of unknown shapes."""
    planner = site.planner(recipe)
    return () if planner.shape(recipe).unknown else to_fit(planner, site.budget(recipe, disk=True))


def refused(plan: Plan, changes: Sequence[object]) -> FitError | UnknownFitError:
    """The error of a run that does not fit, or of which it has to be known whether it fits, and is not.

    Args:
        plan: as it stands.
        changes: that make it fit, in words.
    """
    if plan.state == "does not fit":
        return FitError(
            "Run does not fit",
            got=plan.verdict,
            need=f"a peak below {format_bytes(plan.budget.device)}",
            try_="\n".join(map(str, changes)) or "a smaller model",
        )
    return UnknownFitError(
        "Memory of this run cannot be predicted",
        got=plan.shape.unknown,
        need=f"a peak below {format_bytes(plan.budget.device)}; it is more than {format_bytes(plan.peak_bytes)}",
        try_="tilewright train RECIPE --dry-run --plan.enforce false, which takes two steps and measures them",
    )


def nothing_fits(loaded: Loaded, site: Site, how: How = "least_change", *, same_numbers: bool = False) -> FitError:
    """Make the error of a run that fits under no plan: the smallest budget that suffices, and other changes to type,
    each as the same command would plan it.

    Args:
        loaded: the run's settings.
        site: machine and rates.
        how, same_numbers: see `decide`.
    """
    recipe = on_machine(loaded, site.machine).recipe
    budget = site.budget(recipe, disk=True)
    replan = replanned(loaded, site, how, same_numbers=same_numbers)
    changes = [str(change) for change in cheapest_changes(recipe, budget, None, replan)]
    return no_plan(_widest(loaded, site, how), budget, changes)


def replanned(
    loaded: Loaded, site: Site, how: How, *, same_numbers: bool = False
) -> Callable[[Mapping[str, Any], Budget], Plan | None]:
    """A function that plans the same command with more settings and another budget; it returns None where nothing fits.

    Args:
        loaded: the run's settings.
        site: machine and rates.
        how, same_numbers: see `decide`.
    """

    def replan(settings: Mapping[str, Any], budget: Budget) -> Plan | None:
        other, there = typed_too(loaded, settings), replace(site, given=budget)
        if other is None:
            return None
        if how == "least_change":  # most do not fit, and these tell soonest
            stands = there.planner(on_machine(other, there.machine).recipe).as_it_stands(budget)
            if stands.keeps_margin:
                return stands
            if _widest(other, there, how).plan(budget) is None:
                return None
        found = decide(other, there, how, same_numbers=same_numbers)
        return found if found.accepted else None

    return replan


def smallest_in_words(loaded: Loaded, site: Site) -> str:
    """The smallest budgets that `train` accepts for a run that does not fit."""
    budget = site.budget(loaded.recipe, disk=True)
    return no_plan(_widest(loaded, site, "least_change"), budget, []).problems[0].need


def _widest(loaded: Loaded, site: Site, how: How) -> Planner:
    """A planner that may decide all that any stage of `decide` may; the error of a run that does not fit is made from
    it."""
    if how == "fastest":
        return free_planner(loaded, site)
    recipe, explicit = on_machine(loaded, site.machine).recipe, user_settings(loaded)
    fixed = typed(recipe, explicit)
    if fixed.activations and fixed.executor is None:  # what layers keep was written for the executor that there is
        fixed = replace(fixed, executor=recipe.memory.executor)
    return site.planner(recipe, replace(fixed, most_rows=recipe.train.micro_batch_size), FORMAT_FIELDS - explicit)
