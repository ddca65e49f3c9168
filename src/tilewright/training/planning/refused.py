"""Errors of runs that do not fit, or of which it is not known, each with changes that the same command accepts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewright.core.config.edit import accepted
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import FitError, UnknownFitError
from tilewright.core.units import format_bytes
from tilewright.planner.advice.changes import cheapest_changes
from tilewright.planner.advice.describe import no_plan
from tilewright.planner.advice.fixes import Fix, find_fixes
from tilewright.planner.decide import FORMATS, decide, typed
from tilewright.planner.model.constraints import Constraints, fuses
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner
from tilewright.planner.site import Site
from tilewright.planner.summary import summarize


def fixes_of(recipe: Recipe, site: Site) -> tuple[Fix, ...]:
    """The cheapest changes with which a recipe fits as it stands then; none of a model of which nothing is known."""
    planner = site.planner(recipe)
    return () if planner.shape(recipe).unknown else find_fixes(planner, site.budget(recipe, disk=True))


def refused(plan: Plan | Plan, changes: Sequence[object]) -> FitError | UnknownFitError:
    """The error of a run that does not fit, or of which it has to be known, and is not, whether it fits.

    Args:
        plan: as it stands.
        changes: that make it fit, in words.
    """
    if isinstance(plan, Plan):
        plan = summarize(plan)
    if plan.state == "does not fit":
        return FitError(
            "Run does not fit",
            got=plan.verdict,
            need=f"a peak below {format_bytes(plan.budget_bytes)}",
            try_="\n".join(map(str, changes)) or "a smaller model",
        )
    return UnknownFitError(
        "Memory of this run cannot be predicted",
        got=plan.unknown,
        need=f"a peak below {format_bytes(plan.budget_bytes)}; it is more than {format_bytes(plan.peak_bytes)}",
        try_="tilewright train RECIPE --dry-run --plan.enforce false, which takes two steps and measures them",
    )


def nothing_fits(recipe: Recipe, site: Site, explicit: frozenset[str], *, same_numbers: bool) -> FitError:
    """The error of a run that no plan makes fit: the smallest budget that `train` accepts for it, and what may be typed
    too, each as `train` would plan it then.

    Args:
        recipe: the run's settings.
        site: machine and rates.
        explicit: settings that the user set.
        same_numbers: see `auto.stages`.
    """
    budget = site.budget(recipe, disk=True)

    def replan(settings: Mapping[str, Any], there: Budget) -> Plan | None:
        other, names = accepted(recipe, settings), explicit | frozenset(settings)
        if other is None:
            return None
        planner = site.planner(other)
        if _widest(planner, names).plan(there) is None:  # most do not fit, and this tells soonest
            return None
        plan = planner.as_it_stands(there)
        if plan.least_device <= there.device:
            return plan
        found = decide(
            planner,
            names,
            replace(there, disk=0.0, links=replace(there.links, disk=None)),
            lambda: there,
            fused=fuses(planner.shape(other).compiled, site.machine),
            same_numbers=same_numbers,
        )
        return None if found is None else found.plan

    changes = [str(change) for change in cheapest_changes(recipe, budget, None, replan)]
    return no_plan(_widest(site.planner(recipe), explicit), budget, changes)


def smallest_in_words(recipe: Recipe, site: Site, explicit: frozenset[str]) -> str:
    """The smallest budgets that `train` accepts for a run that does not fit.

    Args:
        recipe: the run's settings.
        site: machine and rates.
        explicit: settings that the user set.
    """
    error = no_plan(_widest(site.planner(recipe), explicit), site.budget(recipe, disk=True), [])
    return error.problems[0].need


def _widest(planner: Planner, explicit: frozenset[str]) -> Planner:
    """The planner that may decide all that some stage of `auto` may."""
    return planner.with_fixed(_last(planner.recipe, explicit), FORMATS - explicit)


def _last(recipe: Recipe, explicit: frozenset[str]) -> Constraints:
    """All that may be decided: what the error of a run that does not fit is about."""
    fixed = typed(recipe, explicit)
    if fixed.activations and fixed.executor is None:  # what layers keep was written for the executor that there is
        fixed = replace(fixed, executor=recipe.memory.executor)
    return replace(fixed, most_rows=recipe.train.micro_batch_size)
