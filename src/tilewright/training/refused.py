"""Errors of runs that do not fit, or of which it is not known, each with changes that the same command accepts.

Called by `planned` and `cli.plan`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilewright.core.config import Recipe
from tilewright.core.errors import FitError, UnknownFitError
from tilewright.core.units import format_bytes
from tilewright.plan.auto import FORMATS, decide, typed
from tilewright.plan.changes import cheapest_changes
from tilewright.plan.cost import Plan, make_plan
from tilewright.plan.fixed import Fixed, fuses
from tilewright.plan.fixes import accepted
from tilewright.plan.joint import JointPlanner
from tilewright.plan.joint_plan import Budget, JointPlan
from tilewright.plan.joint_words import no_plan
from tilewright.training.site import Site


def not_known(plan: Plan) -> UnknownFitError:
    """The error of a run of which it has to be known, and is not, whether it fits."""
    return UnknownFitError(
        "It is not known whether this run fits.",
        got=plan.unknown,
        need=f"a peak below {format_bytes(plan.budget_bytes)}; it is more than {format_bytes(plan.peak_bytes)}",
        try_="tilewright train RECIPE --dry-run --plan.enforce false, which takes two steps and measures them",
    )


def does_not_fit(plan: Plan) -> FitError:
    """The error of a run that the plan says does not fit, with the cheapest changes that make it fit."""
    return FitError(
        "This run does not fit.",
        got=plan.verdict,
        need=f"a peak below {format_bytes(plan.budget_bytes)}",
        try_="\n".join(str(fix) for fix in plan.fixes) or "a smaller model",
    )


def nothing_fits(recipe: Recipe, site: Site, explicit: frozenset[str], *, same_numbers: bool) -> FitError:
    """The error of a run that no plan makes fit: the smallest budget that `train` accepts for it, and what may be typed
    besides, each as `train` would plan it then.

    Args:
        recipe: the run's settings.
        site: machine and rates.
        explicit: settings that the user set.
        same_numbers: see `auto.stages`.
    """
    budget = site.budget(recipe, disk=True)

    def replan(settings: Mapping[str, Any], there: Budget) -> Plan | JointPlan | None:
        other, names = accepted(recipe, settings), explicit | frozenset(settings)
        if other is None:
            return None
        planner = site.planner(other)
        if _widest(planner, names).plan(there) is None:  # most do not fit, and this tells soonest
            return None
        plan = make_plan(other, site.vocab_size, site.machine, site.rates, fixes=False)
        plan = replace(plan, budget_bytes=int(there.device))
        if plan.fits_with(other.plan.margin):
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


def _widest(planner: JointPlanner, explicit: frozenset[str]) -> JointPlanner:
    """The planner that may decide all that some stage of `auto` may."""
    return planner.with_fixed(_last(planner.recipe, explicit), FORMATS - explicit)


def _last(recipe: Recipe, explicit: frozenset[str]) -> Fixed:
    """All that may be decided: what the error of a run that does not fit is about."""
    fixed = typed(recipe, explicit)
    if fixed.activations and fixed.executor is None:  # what layers keep was written for the executor that there is
        fixed = replace(fixed, executor=recipe.memory.executor)
    return replace(fixed, most_rows=recipe.train.micro_batch)
