"""What `memory.plan` decides before a run: the recipe with the plan's settings, and what is done with each layer.

    ""      nothing: the run is as the recipe says; the plain plan tells whether it fits
    "auto"  where the recipe as it stands fits with a margin, the same; else `plan.auto` decides what it leaves open
    FILE    a plan that `tilewright plan --out` wrote

A run keeps its plan in its folder (`plan.toml`) and goes on under it, so that it goes on with the same numbers.
Called by `assemble.set_up`; `carried` by `loop`, before anything is planned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tilewright.core.check import conflicts
from tilewright.core.config import Recipe
from tilewright.core.errors import ConfigError, FitError, Problem, TilewrightError, UnknownFitError
from tilewright.core.load import CLI, DEFAULT, Loaded
from tilewright.core.log import say
from tilewright.core.placement import Placement
from tilewright.core.units import format_bytes, format_seconds
from tilewright.plan.auto import Decision, decide, written
from tilewright.plan.cost import Plan, make_plan
from tilewright.plan.fixed import fuses
from tilewright.plan.joint_plan import JointPlan
from tilewright.plan.joint_words import verdict
from tilewright.plan.options import Setting
from tilewright.plan.plain import plain
from tilewright.plan.plan_file import PlanFile, read_plan, to_toml
from tilewright.plan.replan import Replanner
from tilewright.training.durable import write_whole
from tilewright.training.placement_words import words
from tilewright.training.refused import does_not_fit, not_known, nothing_fits
from tilewright.training.site import Site
from tilewright.training.slicing import placed

AUTO, NONE = "auto", ""
FILE = "plan.toml"
"""In a run folder: the plan that the run executes."""


@dataclass(frozen=True)
class Planned:
    """What was decided."""

    loaded: Loaded
    """With the plan's settings, whose source is the plan."""
    plan: Plan
    """What the run is expected to take."""
    site: Site
    joint: JointPlan | None = None
    """None where the run is as the recipe says."""
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """(text, numbers) of what is worth telling."""
    note: str = ""
    """Why the joint planner decides nothing here, and cannot plan again."""
    explicit: frozenset[str] = field(default=frozenset())

    @property
    def placement(self) -> Placement | None:
        """What is done with each layer; None: the same with all, as the recipe's settings say."""
        return None if self.joint is None else self.joint.placement

    def write(self, folder: Path) -> None:
        """Keep the plan in the run's folder, or take an old one away."""
        if self.joint is not None:
            write_whole(folder / FILE, to_toml(self.joint))
        else:
            (folder / FILE).unlink(missing_ok=True)

    @cached_property
    def replanner(self) -> Replanner | None:
        """Plans the run anew while it goes on; None where there is no plan, or the planner does not know the model."""
        if self.note or self.loaded.recipe.memory.plan == NONE:
            return None
        recipe = self.loaded.recipe
        away = {tier for layer in self.placement or () for tier in (layer.parameters, layer.states, layer.inputs)}
        disk = "disk" in away | {recipe.memory.parameters, recipe.memory.states, recipe.memory.inputs}
        fixed = written(recipe, self.explicit)
        if self.joint is None and recipe.memory.executor == "layer_major":
            fixed = replace(fixed, activations=frozenset(["recompute"]))  # as it stands it fits, and does not grow
        planner = self.site.planner(recipe, fixed)
        try:
            num_layers = planner.shape(recipe).num_layers
        except TilewrightError as error:
            say(f"note: nothing is planned anew in this run: {str(error).splitlines()[0]}")
            return None
        placement = self.placement or placed(recipe, num_layers)
        budget = self.site.budget(recipe, disk=disk and recipe.memory.executor == "layer_major")
        return Replanner(planner, Setting.of(recipe), placement, budget)


def carried(loaded: Loaded, folder: Path) -> tuple[Loaded, PlanFile | None]:
    """The recipe of a run that goes on, with the settings of the plan in its folder, and that plan.

    A setting that somebody types now comes before the plan's.

    Raises:
        ConfigError: the folder's plan cannot be read.
    """
    path = folder / FILE
    if loaded.recipe.memory.plan != AUTO or not path.exists():
        return loaded, None
    file = read_plan(path)
    open_ = {name: value for name, value in file.settings.items() if loaded.sources.get(name, DEFAULT) == DEFAULT}
    return with_settings(loaded, open_, FILE), file


def plan_run(loaded: Loaded, site: Site, *, running: PlanFile | None = None, goes_on: bool = False) -> Planned:
    """Decide.

    Args:
        loaded: the recipe; of a run that goes on, from `carried`.
        site: machine, rates, folder.
        running: the plan in the folder of a run that goes on.
        goes_on: only what changes no number may be decided.

    Raises:
        ConfigError: a plan file that cannot be read, or is for another model or machine, or that what was typed
            contradicts.
        FitError: nothing fits, and `plan.enforce` is set.
        UnknownFitError: nothing is known, `plan.device_budget` and `plan.enforce` are set.
    """
    wanted = loaded.recipe.memory.plan
    if wanted not in (AUTO, NONE):
        return _from_file(loaded, read_plan(Path(wanted).expanduser()), site)
    explicit = frozenset(name for name, source in loaded.sources.items() if source not in (DEFAULT, f"plan {FILE}"))
    running = running or _beside(loaded)
    if wanted == AUTO and running is not None:
        found = _running(loaded, running, site, explicit)
        if found is not None:
            return found
    plan = make_plan(loaded.recipe, site.vocab_size, site.machine, site.rates, fixes=False)
    as_it_stands = Planned(loaded, plan, site, explicit=explicit)
    if plan.state == "not known":
        return _not_known(as_it_stands)
    if wanted == NONE or plan.fits_with(loaded.recipe.plan.margin):
        return _refused(as_it_stands) if not plan.fits else as_it_stands
    return _decided(as_it_stands, goes_on)


def _beside(loaded: Loaded) -> PlanFile | None:
    """The plan of the run whose run.toml is the recipe: what differs by layer is only there."""
    if loaded.path is None or loaded.path.name != "run.toml" or not (loaded.path.parent / FILE).exists():
        return None
    return read_plan(loaded.path.parent / FILE)


def _not_known(stands: Planned) -> Planned:
    """A run as its recipe says, of which the plan does not know whether it fits.

    Raises:
        UnknownFitError: the recipe has a memory budget that is to be kept.
    """
    plan, section = stands.plan, stands.loaded.recipe.plan
    if section.device_budget and section.enforce:
        raise not_known(plan)
    text = f"{plan.verdict} It runs as the recipe says."
    return replace(stands, note=plan.unknown, events=((text, {"least_bytes": plan.peak_bytes}),))


def _decided(stands: Planned, goes_on: bool) -> Planned:
    """What `plan.auto` finds for a recipe that does not fit as it stands."""
    recipe, site = stands.loaded.recipe, stands.site
    fault = "layers come in groups (memory.group)" if recipe.memory.group > 1 else ""
    planner = site.planner(recipe)
    try:
        shape = planner.shape(recipe) if not fault else None
    except (ConfigError, UnknownFitError) as error:
        fault = str(error).splitlines()[0]
    if fault or shape is None:
        text = f"the recipe runs as it stands: {fault}"
        return _refused(replace(stands, note=fault, events=((text, {}),)))
    budget = site.budget(recipe)
    found = decide(
        planner,
        stands.explicit,
        budget,
        lambda: site.budget(recipe, disk=True),
        fused=fuses(shape.compiled, site.machine),
        same_numbers=goes_on,
    )
    if found is not None:
        return _with_plan(stands, found)
    if stands.plan.fits:
        peak, whole = format_bytes(stands.plan.peak_bytes), format_bytes(stands.plan.budget_bytes)
        text = f"{peak} of {whole} are planned, which leaves less than plan.margin free; no other plan fits better"
        return replace(stands, events=((text, {"peak_bytes": stands.plan.peak_bytes}),))
    if recipe.plan.enforce:
        raise nothing_fits(stands.loaded.recipe, site, stands.explicit, same_numbers=goes_on)
    return replace(stands, events=((f"nothing fits, and plan.enforce = false: {stands.plan.verdict}", {}),))


def _refused(stands: Planned) -> Planned:
    """A run as its recipe says, where that fits, or is allowed not to.

    Raises:
        FitError: it does not.
    """
    if stands.plan.fits or not stands.loaded.recipe.plan.enforce:
        return stands
    site = stands.site  # what makes it fit takes seconds to find, so it is looked for here alone
    raise does_not_fit(make_plan(stands.loaded.recipe, site.vocab_size, site.machine, site.rates))


def _with_plan(stands: Planned, found: Decision) -> Planned:
    plan = found.plan
    loaded = with_settings(stands.loaded, plan.settings(), AUTO)
    numbers = {"peak_bytes": int(plan.peak_bytes), "budget_bytes": int(plan.budget.device), "step_s": plan.step_s}
    events: list[tuple[str, Mapping[str, Any]]] = [(f"{verdict(plan)} {words(plan.placement)}", numbers)]
    for change in found.departures:
        text = f"{change.name} {change.before} -> {change.after}: {found.reason}"
        least = {} if found.least_bytes is None else {"least_bytes": int(found.least_bytes)}
        events.append((text, {"setting": change.name, "before": change.before, "after": change.after} | least))
    return replace(stands, loaded=loaded, plan=plain(plan), joint=plan, events=tuple(events))


def _from_file(loaded: Loaded, file: PlanFile, site: Site) -> Planned:
    """A run as a plan file says."""
    _refuse_contradiction(loaded, file)
    before = loaded.recipe
    loaded = with_settings(loaded, file.settings, file.path.name)
    found = _expected(loaded.recipe, file, site)
    if loaded.recipe.plan.enforce:
        file.check_fit(found)
    numbers = {"peak_bytes": int(found.peak_bytes), "budget_bytes": int(found.budget.device), "step_s": found.step_s}
    text = f"{file.path}: {format_bytes(found.peak_bytes)}, {format_seconds(found.step_s)} a step expected here; "
    events: list[tuple[str, Mapping[str, Any]]] = [(text + words(found.placement), numbers)]
    for name, value in file.settings.items():
        old = _value(before, name)
        if old != value:
            text = f"{name} {old} -> {value}: so says the plan"
            events.append((text, {"setting": name, "before": old, "after": value}))
    return Planned(loaded, plain(found), site, found, tuple(events), explicit=frozenset())


def _running(loaded: Loaded, file: PlanFile, site: Site, explicit: frozenset[str]) -> Planned | None:
    """A run that goes on as its folder's plan says; None where that does not fit any more, or something else is typed.

    The same settings with other layers are then looked for: that changes no number.
    """
    if any(_value(loaded.recipe, name) != value for name, value in file.settings.items() if name in explicit):
        return None
    try:
        found = _expected(loaded.recipe, file, site)
        file.check_fit(found)
    except (ConfigError, FitError) as error:
        say(f"note: the plan of this run is not used: {str(error).splitlines()[0]}")
        return None
    return Planned(loaded, plain(found), site, found, explicit=explicit)


def _expected(recipe: Recipe, file: PlanFile, site: Site) -> JointPlan:
    """What a plan file takes here.

    Raises:
        ConfigError: it is for another model or machine.
    """
    file.check_machine(site.machine)
    planner = site.planner(recipe)
    file.check(planner.shape(recipe))
    away = {tier for layer in file.placement for tier in (layer.parameters, layer.states, layer.inputs)}
    return planner.priced(Setting.of(recipe), file.placement, site.budget(recipe, disk="disk" in away))


def _refuse_contradiction(loaded: Loaded, file: PlanFile) -> None:
    """Raise ConfigError where something was typed that the plan says otherwise."""
    said = {
        name: loaded.sources[name]
        for name, value in file.settings.items()
        if loaded.sources[name].startswith((CLI, "env")) and _value(loaded.recipe, name) != value
    }
    if said:
        again = " ".join(f"--{name} {_value(loaded.recipe, name)}" for name in said)
        values = [f"{name} = {_value(loaded.recipe, name)} ({source})" for name, source in said.items()]
        raise ConfigError(
            "The plan and what was typed contradict each other.",
            got=f"{', '.join(values)}; the plan has " + ", ".join(f"{name} = {file.settings[name]}" for name in said),
            need="one of them",
            try_=f"leave {', '.join(f'--{name}' for name in said)} out, or make a plan with it: "
            f"tilewright plan RECIPE {again} --out FILE",
            where="memory.plan",
        )


def with_settings(loaded: Loaded, settings: Mapping[str, Any], source: str) -> Loaded:
    """A recipe with a plan's settings.

    Raises:
        ConfigError: they are not allowed together.
    """
    values = loaded.recipe.model_dump()
    for name, value in settings.items():
        section, _, field_ = name.partition(".")
        values[section][field_] = value
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            "The plan's settings are not a recipe's.",
            got="; ".join(f"{'.'.join(map(str, row['loc']))}: {row['msg']}" for row in error.errors()),
            need="settings as `tilewright plan --out` writes them",
            try_="tilewright plan RECIPE --out FILE, which makes a plan",
            where=source,
        ) from error
    problems = [Problem(one.what, one.got, one.need, one.try_, source) for one in conflicts(recipe)]
    if problems:
        raise ConfigError.from_problems(problems)
    sources = loaded.sources | {
        name: f"plan {source}" for name, value in settings.items() if _value(loaded.recipe, name) != value
    }
    return replace(loaded, recipe=recipe, sources=sources)


def _value(recipe: Recipe, name: str) -> Any:
    section, _, field_ = name.partition(".")
    return recipe.model_dump()[section][field_]
