"""Decisions of `memory.plan` before a run: the recipe with the plan's settings, and the plan of each layer.

    memory.plan = ""      nothing is decided: the run is as its recipe says
    memory.plan = "auto"  under the plan in the run's folder (`plan.toml`), if it has one that still holds;
                          else as the recipe says, where that fits with plan.margin to spare;
                          else as `planner.decide` decides, which changes nothing that the user has set
    memory.plan = FILE    as the plan says that `tilewright plan --out` wrote

A run keeps its plan in its folder and resumes under it, so that it continues with the same numbers. Read `plan_run`
first: each case is a function below it. Nothing here builds a model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.core.atomic_io import write_whole
from tilewright.core.config.change_recipe import on_machine, value_of, with_settings
from tilewright.core.config.load import CLI, DEFAULT, Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError, FitError
from tilewright.core.log import say
from tilewright.core.memory_plan import MemoryPlan, memory_plan_of
from tilewright.core.units import format_bytes, format_seconds
from tilewright.planner.cost.layer_choices import GlobalConfig
from tilewright.planner.decide import AUTO, PLAN_FILE, decide, departures, user_settings, written
from tilewright.planner.plan import Plan
from tilewright.planner.plan_file import PlanFile, read_plan, to_toml
from tilewright.planner.replan import Replanner
from tilewright.planner.site import Site
from tilewright.training.planning.describe_memory_plan import words
from tilewright.training.planning.does_not_fit import changes_to_fit, nothing_fits, refused

NONE = ""


def replanner_of(loaded: Loaded, site: Site, plan: Plan) -> Replanner | None:
    """Resolve what plans a run again while it runs; None where there is no plan, or the planner does not know the
    model.

    Args:
        loaded, plan: from `plan_run`.
        site: where it runs.
    """
    recipe = loaded.recipe
    if plan.stands_because or recipe.memory.plan == NONE:
        return None
    fixed = written(recipe, fixed_by_user(loaded))
    if not plan.decided and not recipe.memory.can.activation_checkpoint:
        fixed = replace(fixed, activations=frozenset(["recompute"]))  # as it stands it fits, and does not grow
    planner = site.planner(recipe, fixed)
    num_layers = planner.shape(recipe).num_layers
    if not num_layers:
        say("note: no re-planning in this run: the layers of this model cannot be recomputed one by one")
        return None
    memory_plan = plan.memory_plan if plan.decided else memory_plan_of(recipe, num_layers)
    disk = recipe.memory.can.offload and "disk" in _tiers(memory_plan) | set(recipe.memory.tiers)
    return Replanner(planner, GlobalConfig.of(planner.recipe), memory_plan, site.budget(recipe, disk=disk))


def fixed_by_user(loaded: Loaded) -> frozenset[str]:
    """Names of the settings that the user has set in a file, in the environment or on the command line, which stay when
    a plan is resolved.

    Args:
        loaded: from `plan_run`. A plan file leaves nothing to the recipe: there are none.
    """
    return user_settings(loaded) if loaded.recipe.memory.plan in (AUTO, NONE) else frozenset()


def write_plan(plan: Plan, folder: Path) -> None:
    """Write the resolved plan: keep what was decided layer by layer in the run's folder, or take an old plan away."""
    if plan.decided:
        write_whole(folder / PLAN_FILE, to_toml(plan))
    else:
        (folder / PLAN_FILE).unlink(missing_ok=True)


def plan_run(
    loaded: Loaded, site: Site, *, run_plan: PlanFile | None = None, resuming: bool = False
) -> tuple[Loaded, Plan]:
    """Resolve `memory.plan`: decide what a run executes, one of the cases in this file's first lines: the recipe with
    the plan's settings, whose source is the plan, and the plan. Of several ranks it is that of the rank that holds
    most; the mesh stays as the recipe says it.

    Args:
        loaded: the recipe; of a run that resumes, from `load_run_plan`.
        site: machine, rates, folder.
        run_plan: the plan in the folder of a run that resumes.
        resuming: only what changes no number may be decided.

    Raises:
        ConfigError: a plan file that cannot be read, is for another model or machine, or contradicts the command line.
        FitError: nothing fits, and `plan.enforce` is set.
        UnknownFitError: nothing is known, `plan.device_memory` and `plan.enforce` are set.
    """
    loaded = on_machine(loaded, site.machine)
    parallel = loaded.recipe.parallel
    found, plan = _plan_run(replace(loaded, recipe=site.at_mesh(loaded.recipe)), site, run_plan, resuming)
    return replace(found, recipe=found.recipe.model_copy(update={"parallel": parallel})), plan


def _plan_run(loaded: Loaded, site: Site, run_plan: PlanFile | None, resuming: bool) -> tuple[Loaded, Plan]:
    """Resolve the plan of a recipe with the numbers of processes that there are."""
    recipe = loaded.recipe
    if recipe.memory.plan not in (AUTO, NONE):
        return _from_file(loaded, read_plan(Path(recipe.memory.plan).expanduser()), site)
    run_plan = run_plan or _plan_beside(loaded)
    if recipe.memory.plan == AUTO and run_plan is not None and recipe.parallel.pp == 1:
        resumed = _under_run_plan(loaded, run_plan, site)
        if resumed is not None:
            return loaded, resumed
    return _as_decided(loaded, site, decide(loaded, site, same_numbers=resuming), resuming)


def load_run_plan(loaded: Loaded, folder: Path) -> tuple[Loaded, PlanFile | None]:
    """Resolve the plan in the folder of a run that resumes, and the recipe with its settings; a setting that the user
    sets now stays.

    Raises:
        ConfigError: the folder's plan cannot be read.
    """
    path = folder / PLAN_FILE
    if loaded.recipe.memory.plan != AUTO or not path.exists():
        return loaded, None
    file = read_plan(path)
    left_open = {name: value for name, value in file.settings.items() if loaded.sources.get(name, DEFAULT) == DEFAULT}
    return with_settings(loaded, left_open, PLAN_FILE), file


def _tiers(memory_plan: MemoryPlan) -> set[str]:
    """Where parameters, states or inputs of some layer are in a resolved plan."""
    return {tier for layer in memory_plan for tier in (layer.parameters, layer.states, layer.inputs)}


# ---- under the plan of the run's folder ----


def _plan_beside(loaded: Loaded) -> PlanFile | None:
    """Resolve the plan of the run whose run.toml is the recipe: what differs by layer is only there."""
    if loaded.path is None or loaded.path.name != "run.toml" or not (loaded.path.parent / PLAN_FILE).exists():
        return None
    return read_plan(loaded.path.parent / PLAN_FILE)


def _under_run_plan(loaded: Loaded, file: PlanFile, site: Site) -> Plan | None:
    """Resolve a run that resumes as its folder's plan says; None where that fits no more, or the user has set something
    else.

    The same settings with other layers are then looked for: that changes no number.
    """
    explicit = user_settings(loaded)
    if any(value_of(loaded.recipe, name) != value for name, value in file.settings.items() if name in explicit):
        return None
    try:
        found = _priced(loaded.recipe, file, site)
        file.check_fit(found)
    except (ConfigError, FitError) as error:
        say(f"note: the plan of this run is not used: {str(error).splitlines()[0]}")
        return None
    return found


def _priced(recipe: Recipe, file: PlanFile, site: Site) -> Plan:
    """Resolve the plan of a file, priced here.

    Raises:
        ConfigError: it is for another model or machine.
    """
    file.check_machine(site.machine)
    planner = site.planner(recipe)
    file.check(planner.shape(recipe))
    budget = site.budget(recipe, disk="disk" in _tiers(file.memory_plan))
    return replace(planner.priced(GlobalConfig.of(planner.recipe), file.memory_plan, budget), decided=True)


# ---- as it is decided ----


def _as_decided(loaded: Loaded, site: Site, plan: Plan, resuming: bool) -> tuple[Loaded, Plan]:
    """A resolved decision on the plan, and its text.

    Raises:
        FitError: nothing fits, and `plan.enforce` is set.
        UnknownFitError: the recipe has a memory budget that is to be kept, and nothing is known of the run.
    """
    recipe = loaded.recipe
    if plan.decided:
        told = tuple(_told(recipe, plan))
        return with_settings(loaded, plan.settings(), AUTO), replace(plan, events=told)
    if plan.state == "not known":
        if recipe.plan.device_memory and recipe.plan.enforce:
            raise refused(plan, ())
        plan = replace(plan, stands_because=plan.shape.unknown)
        return loaded, _saying(plan, f"{plan.verdict} It runs as the recipe says.", least_bytes=int(plan.peak_bytes))
    if plan.state != "fits" and recipe.plan.enforce:
        if recipe.memory.plan == NONE or plan.stands_because:
            raise refused(plan, changes_to_fit(recipe, site))
        raise nothing_fits(loaded, site, same_numbers=resuming)
    if plan.stands_because:
        return loaded, _saying(plan, f"the recipe runs as it stands: {plan.stands_because}")
    if recipe.memory.plan == NONE or plan.keeps_margin:
        return loaded, plan
    if plan.state == "fits":
        peak, whole = format_bytes(plan.peak_bytes), format_bytes(plan.budget.device)
        text = f"{peak} of {whole} are planned, which leaves less than plan.margin free; no other plan fits better"
        return loaded, _saying(plan, text, peak_bytes=int(plan.peak_bytes))
    return loaded, _saying(plan, f"nothing fits, and plan.enforce = false: {plan.verdict}")


def _saying(plan: Plan, text: str, **numbers: int) -> Plan:
    return replace(plan, events=((text, numbers),))


def _told(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(text, numbers) of a plan that was resolved, and of each setting that it changes."""
    numbers = {"peak_bytes": int(plan.peak_bytes), "budget_bytes": int(plan.budget.device), "step_s": plan.step_s}
    yield f"{plan.verdict} {words(plan.memory_plan)}", numbers
    least = {} if plan.least_bytes is None else {"least_bytes": int(plan.least_bytes)}
    for change in departures(recipe, plan):
        text = f"{change.name} {change.before} -> {change.after}: {_reason(plan)}"
        yield text, {"setting": change.name, "before": change.before, "after": change.after} | least


def _reason(plan: Plan) -> str:
    """Why a resolved plan departed from the recipe; empty where it did not."""
    if plan.least_bytes is None:
        return ""
    budget, margin = plan.budget.device, plan.recipe.plan.margin
    least = format_bytes(plan.least_bytes) if plan.least_bytes else "more than the host has"
    return (
        f"with what the recipe says a step takes {least} at least, and {format_bytes((1 - margin) * budget)} of "
        f"{format_bytes(budget)} may be used (plan.margin {margin:g})"
    )


# ---- as a plan file says ----


def _from_file(loaded: Loaded, file: PlanFile, site: Site) -> tuple[Loaded, Plan]:
    """Resolve a run as a plan file says, which leaves nothing to the recipe."""
    _check_no_contradiction(loaded, file)
    before = loaded.recipe
    loaded = with_settings(loaded, file.settings, file.path.name)
    found = _priced(loaded.recipe, file, site)
    if loaded.recipe.plan.enforce:
        file.check_fit(found)
    numbers = {"peak_bytes": int(found.peak_bytes), "budget_bytes": int(found.budget.device), "step_s": found.step_s}
    text = f"{file.path}: {format_bytes(found.peak_bytes)}, {format_seconds(found.step_s)} a step expected here; "
    events: list[tuple[str, Mapping[str, Any]]] = [(text + words(found.memory_plan), numbers)]
    for name, value in file.settings.items():
        old = value_of(before, name)
        if old != value:
            text = f"{name} {old} -> {value}: set by the plan"
            events.append((text, {"setting": name, "before": old, "after": value}))
    return loaded, replace(found, events=tuple(events))


def _check_no_contradiction(loaded: Loaded, file: PlanFile) -> None:
    """Raise ConfigError where something was typed that the resolved plan says otherwise."""
    said = {
        name: loaded.sources[name]
        for name, value in file.settings.items()
        if loaded.sources[name].startswith((CLI, "env")) and value_of(loaded.recipe, name) != value
    }
    if said:
        again = " ".join(f"--{name} {value_of(loaded.recipe, name)}" for name in said)
        values = [f"{name} = {value_of(loaded.recipe, name)} ({source})" for name, source in said.items()]
        raise ConfigError(
            "Plan conflicts with command-line options",
            got=f"{', '.join(values)}; the plan has " + ", ".join(f"{name} = {file.settings[name]}" for name in said),
            need="one of them",
            try_=f"leave {', '.join(f'--{name}' for name in said)} out, or make a plan with it: "
            f"tilewright plan RECIPE {again} --out FILE",
            where="memory.plan",
        )
