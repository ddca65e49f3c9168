"""The ways to fine-tune a model, each as `tilewright finetune` plans it on a machine, and the command that does it.

Of the model its configuration is enough. What is planned is the command's own recipe with the command's own planning
(`training.planning.resolve_plan`), so its numbers are those that the run begins with.
"""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewright.cli.commands.chat_models.tuned_recipe import HOWS, tuned_recipe
from tilewright.core.config.change_recipe import changed, on_machine
from tilewright.core.config.load import Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import CheckpointError, ConfigError, TilewrightError
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.models.build import check_data
from tilewright.models.folder.find_model import is_hub_name, missing_files
from tilewright.planner.advice.recipe_changes import WORTH, Change, of_shards
from tilewright.planner.cost.rank_share import Shards
from tilewright.planner.decide import decide, departures, typed_too, variants
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.plan import Plan, State
from tilewright.planner.planner import FORMAT_FIELDS
from tilewright.planner.site import Site
from tilewright.training.components.recipe_tokenizer import tokenizer_path
from tilewright.training.planning.advice import as_settings
from tilewright.training.planning.describe_memory_plan import words
from tilewright.training.planning.does_not_fit import smallest_in_words
from tilewright.training.planning.plan_request import PlanRequest, site_of
from tilewright.training.planning.resolve_plan import plan_run

_LONGEST = 200
"""Characters of a reason; transformers' own are paragraphs."""


@dataclass(frozen=True)
class Way:
    """One way to fine-tune a model, and what it is expected to take."""

    how: str
    """As `tilewright finetune --how` has it."""
    loaded: Loaded
    """Its recipe."""
    command: str
    """Empty where the command would refuse."""
    plan: Plan | None
    """The run's plan; None where the model cannot be planned."""
    changes: Mapping[str, Any]
    """Settings that the plan changes to make it fit."""
    layers: str = ""
    """The plan's choice for layers where it decides; else empty."""
    unknown: str = ""
    """Why it is not known whether it fits."""
    need: str = ""
    """The smallest budgets in which it fits, where it does not."""
    remedy: Change | None = None
    """Changes that make it fit and that the plan may not decide by itself."""
    remedy_command: str = ""
    """The command with that."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Settings in the command because they are faster."""
    plain: Plan | None = None
    """The run's plan without them; None where there are none."""

    @property
    def changes_learning(self) -> bool:
        """True where a way to fine-tune changes what is learned."""
        return bool({*FORMAT_FIELDS, "optim.clip"} & set(self.chosen))

    @property
    def state(self) -> State:
        """The state of a way to fine-tune: that of its plan, or "not known" without one."""
        return "not known" if self.plan is None else self.plan.state


def ways(model: str, shown: str, typed: Sequence[str], options: PlanRequest) -> Iterator[Way]:
    """The ways to fine-tune a model, each planned; it takes seconds, for a large model of transformers' code some ten
    of them.

    Args:
        model: a folder, or a hub's name, whose configuration is on this machine.
        shown: the model's name in the commands.
        typed: settings as on a command line.
        options: machine and budgets.

    Raises:
        CheckpointError: the folder cannot be read.
        ConfigError: settings or budgets that are not right.
    """
    for option, text in (("--host-memory", options.host_memory), ("--disk-memory", options.disk_memory)):
        if text and not options.on:
            raise ConfigError(
                "Host and disk budgets of a fine-tune cannot be typed",
                got=f"{option} {text}",
                need="--device-memory alone, which the run's plan.device_memory sets too",
                try_=f"--device-memory, or {option} with --on h200 for another machine",
                where=option,
            )
    budget = [f"--plan.device_memory={options.device_memory.strip()}"] if options.device_memory else []
    planning = _Planning(options)
    for how in HOWS:
        more = [*typed, *budget]
        loaded, _ = tuned_recipe(model, [], how, more, weights=False)
        way = planning.way(loaded, how)
        if way.plan is not None and way.state != "does not fit":
            if way.state == "fits":
                way = _best(way, planning)
            elif loaded.recipe.plan.device_memory:
                more = [*more, "--plan.enforce=false"]  # a budget is kept: a run of which nothing is known is refused
            way = replace(way, command=command_of(way.loaded, shown, how, [*more, *_as_typed(way.chosen)]))
        elif way.need:
            way = _remedied(way, model, shown, more, planning)
        yield way


def _best(way: Way, planning: "_Planning") -> Way:
    """Choose the fastest way to fine-tune for a row of the table. It is the recipe as `train` plans it with faster
    settings; where that does not fit, optimizer states and clipping may take less memory, if the user has not set
    these. A setting that changes what is learned must gain as much again over the fastest without it.

    Args:
        way: as `train` plans it.
        planning: of this model.
    """
    site = planning.site(way.loaded)
    best, found = _as_fast(way, way, {}, decide(way.loaded, site, "fastest"), planning), []
    for settings in variants(way.loaded) if way.layers else ():
        loaded = typed_too(way.loaded, settings)
        fastest = None if loaded is None else decide(loaded, site, "fastest")
        if fastest is not None and fastest.accepted:
            found.append((fastest, settings))
    top = max((plan.tokens_per_s for plan, _ in found), default=1.0)
    # Of equally fast ones the first takes least of the host.
    for plan, settings in sorted(found, key=lambda one: (-round(one[0].tokens_per_s / top, 2), one[0].host_bytes)):
        if best.plan is not None and plan.tokens_per_s > WORTH * best.plan.tokens_per_s:
            best = _as_fast(best, way, settings, plan, planning)
    return best


def _as_fast(best: Way, way: Way, settings: Mapping[str, Any], fastest: Plan, planning: "_Planning") -> Way:
    """Return the fastest way to fine-tune: `best`, or these settings with those of the plan `fastest` where they gain
    enough."""
    for more in as_settings(fastest, on_machine(way.loaded, planning.site(way.loaded).machine).recipe):
        chosen = {**settings, **more}
        loaded = typed_too(way.loaded, chosen)
        other = None if loaded is None else planning.way(loaded, way.how)
        if other is None or other.plan is None or best.plan is None or other.state != "fits":
            continue
        if other.plan.tokens_per_s > WORTH * best.plan.tokens_per_s:
            best = replace(other, chosen=chosen, plain=way.plan)
    return best


def _as_typed(settings: Mapping[str, Any]) -> list[str]:
    """Settings of a way to fine-tune as on a command line."""
    return [f"--{name}={str(value).lower()}" for name, value in settings.items()]


def _remedied(way: Way, model: str, shown: str, typed: Sequence[str], planning: "_Planning") -> Way:
    """A way to fine-tune on several ranks with what makes it fit by more communication, planned as if it were typed, if
    anything does."""
    for settings, keeps in of_shards(way.loaded.recipe, 1):
        more = [*typed, *_as_typed(settings)]
        other, _ = tuned_recipe(model, [], way.how, more, weights=False)
        plan = planning.way(other, way.how).plan
        if plan is not None and plan.state == "fits":
            command = command_of(other, shown, way.how, more)
            return replace(way, remedy=Change(settings, keeps, plan), remedy_command=command)
    return way


class _Planning:
    """Plans ways of one model, which is built and checked once for all of them.

    Args:
        options: machine and budgets.
    """

    def __init__(self, options: PlanRequest) -> None:
        self.options = options
        self._finder: ShapeFinder | None = None
        self._checked: dict[object, CheckpointError | None] = {}

    def site(self, loaded: Loaded) -> Site:
        """The site for which a way to fine-tune is planned, with what is known of its model."""
        vocab_size = _vocab_size(loaded) or 1  # less than any embedding has
        site = replace(site_of(loaded, self.options, vocab_size), finder=self._finder)
        self._finder = site.shapes
        return site

    def way(self, loaded: Loaded, how: str) -> Way:
        """A way to fine-tune without its command."""
        vocab_size, site = _vocab_size(loaded), self.site(loaded)
        recipe = changed(loaded.recipe, {"plan.enforce": False})  # whether it fits is the answer here, and no error
        if (error := self._why_no_model(recipe, vocab_size)) is not None:
            return Way(how, loaded, "", None, {}, unknown=reason(error))
        try:
            planned, found = plan_run(replace(loaded, recipe=recipe), site)
        except (CheckpointError, ConfigError) as error:  # a model that cannot be adapted so
            return Way(how, loaded, "", None, {}, unknown=reason(error))
        if found.state != "fits":
            need = "" if found.shape.unknown else smallest_in_words(planned, site)
            return Way(how, loaded, "", found, {}, unknown=found.shape.unknown, need=need)
        if not found.decided:
            return Way(how, loaded, "", found, {})
        stands = on_machine(loaded, site.machine).recipe
        changes = {change.name: change.after for change in departures(stands, found)}
        return Way(how, loaded, "", found, changes, words(found.memory_plan))

    def _why_no_model(self, recipe: Recipe, vocab_size: int | None) -> CheckpointError | None:
        """Explain why a fine-tune has no model: the error of an architecture or a configuration that cannot be built.

        Raises:
            ConfigError: rows of the data would not fit the model.
        """
        key = (recipe.model, recipe.data.seq_len, vocab_size)
        if key not in self._checked:
            try:
                check_data(*key)
                self._checked[key] = None
            except CheckpointError as error:
                self._checked[key] = error
        return self._checked[key]


def command_of(loaded: Loaded, model: str, how: str, typed: Sequence[str]) -> str:
    """Command of a way to fine-tune, as a shell takes it.

    Args:
        loaded: the recipe of it.
        model: as the user names it.
        how: of `HOWS`.
        typed: settings as on a command line; the data's source is an argument of the command.
    """
    settings, rest = [], list(typed)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if name != "--data.source":
            settings += [name, value]
    ranks = Shards.of(loaded.recipe).ranks
    start = ["torchrun", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    return shlex.join([*start, "tilewright", "finetune", model, loaded.recipe.data.source, "--how", how, *settings])


def lacking(loaded: Loaded) -> list[str]:
    """Files that ways to fine-tune need and the model's folder lacks, in sentences; none that a plan needs."""
    found = []
    model = loaded.recipe.model.path
    if not is_hub_name(model) and (missing := missing_files(Path(model).expanduser(), weights=True)):
        found.append(f"the folder has no {missing[0]}: the commands need the weights")
    try:
        tokenizer_path(loaded.recipe.model, loaded.recipe.data)
    except ConfigError as error:
        found.append(f"{reason(error)}; the commands need one")
    return found


def reason(error: TilewrightError) -> str:
    """Shorten an error to one line of bounded length: the reason why a way to fine-tune is not possible."""
    problem = error.problems[0]
    return textwrap.shorten(
        f"{problem.what}: {problem.got}" if problem.got else problem.what, _LONGEST, placeholder=" ..."
    )


def _vocab_size(loaded: Loaded) -> int | None:
    """Size of the tokenizer's vocabulary for ways to fine-tune; None without one, where a plan takes the model's own,
    as it does anyway."""
    recipe = loaded.recipe
    try:
        path = tokenizer_path(recipe.model, recipe.data)
    except ConfigError:  # `lacking` says so
        return None
    return load_tokenizer(path).vocab_size
