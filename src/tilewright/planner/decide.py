"""The decision on what a run executes: `decide(loaded, site, how)`, for `plan` and for `train` alike.

`least_change`, which is what `train` does: the recipe as it stands where that fits, else the plan that changes it
least. What a recipe says is fixed; what it leaves at its default is decided. In stages, each of which may change more
of what a run computes than the one before: what layers keep and where bytes lie (no bit of a loss), what is beside the
steps (a checkpoint's copy, the format of evaluations), then micro-batches, the loss tile, the executor (rounding), and
at last the optimizer's formats (what is learned). The first stage with a plan that fits is taken, and in it the fastest
plan.

`fastest`: the fastest plan of all. What is typed, or set by a variable of the environment, is fixed; the optimizer's
formats are narrowed only where they are written nowhere and nothing else fits. So is the disk used, of a place that
does not give it.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tilewright.core.config.change_recipe import accepted, on_machine, value_of
from tilewright.core.config.executors import capabilities_of
from tilewright.core.config.load import CLI, DEFAULT, Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.memory_plan import KIND_OF, Activations
from tilewright.planner.advice.pipeline_rank_memory import as_it_stands, largest_stage, note_of
from tilewright.planner.cost.layer_choices import executors
from tilewright.planner.cost.step_phases import written_beside
from tilewright.planner.model.constraints import BESIDE, KEPT, Constraints, fuses, same_bits
from tilewright.planner.plan import Plan
from tilewright.planner.planner import FORMAT_FIELDS, Planner, narrower
from tilewright.planner.site import Site, on_disk

How = Literal["least_change", "fastest"]
AUTO = "auto"
"""`memory.plan` of a run that is decided here; the source of what it decides, too."""
CUT = "nothing is decided layer by layer for matrices that are cut over processes yet"
PLAN_FILE = "plan.toml"
"""In a run folder: the plan that the run executes."""


@dataclass(frozen=True)
class Stage:
    """The room of a decision. `disk`: bytes may be there; `formats`: the optimizer's may be narrowed; `beside`:
    settings that no step reads, changed."""

    fixed: Constraints
    disk: bool = False
    formats: frozenset[str] = frozenset()
    beside: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfigChange:
    """A setting that a decision changes in the recipe."""

    name: str
    before: object
    after: object


def written(recipe: Recipe, explicit: frozenset[str]) -> Constraints:
    """The user's settings among those that are decided layer by layer. An executor says nothing of what layers keep.

    Args:
        recipe: the run's settings.
        explicit: those of them that were written down.
    """
    memory = recipe.memory
    parameters, states, inputs = memory.tiers
    kept: Activations | None = None
    if memory.can.activation_checkpoint and "train.activation_checkpoint" in explicit:
        kept = KIND_OF[recipe.train.activation_checkpoint]
    return Constraints(
        activations=None if kept is None else frozenset([kept]),
        parameters=parameters if "memory.offload_params" in explicit else None,
        states=states if "memory.offload_optimizer" in explicit else None,
        inputs=inputs if "memory.offload_activations" in explicit else None,
        mlp_chunks=memory.mlp_chunks if "memory.mlp_chunks" in explicit else None,
        attention_block=memory.attention_block if "memory.attention_block" in explicit else None,
    )


def typed(recipe: Recipe, names: frozenset[str]) -> Constraints:
    """The user's settings among all that are decided for a run.

    Args:
        recipe: the run's settings.
        names: those of them that were written down.
    """
    memory, train, found = recipe.memory, recipe.train, written(recipe, names)
    chosen = "memory.executor" in names or (found.activations is not None and found.activations != {"keep"})
    return replace(
        found,
        executor=memory.executor if chosen else None,  # what keeps less than all is said of the standard one alone
        micro_batch_size=train.micro_batch_size if "train.micro_batch_size" in names else None,
        loss_chunk_bytes=memory.loss_chunk_bytes if "memory.loss_chunk_bytes" in names else None,
    )


def decide(
    loaded: Loaded,
    site: Site,
    how: How = "least_change",
    *,
    same_numbers: bool = False,
    num_layers: int | None = None,
) -> Plan:
    """Decide what a run executes; where nothing fits, the recipe as it stands, which does not.

    Args:
        loaded: the recipe, and who set what.
        site: where it would run.
        how: see the first lines of this file.
        same_numbers: only what changes no bit, for a run that continues.
        num_layers: of a model of the same layers with another number of them; None: as many as it has.

    Raises:
        UnknownFitError: how is `fastest`, and the model cannot be traced.
        OutOfTime: the solver was stopped and had found nothing.
    """
    loaded = on_machine(loaded, site.machine)
    recipe = site.at_mesh(loaded.recipe)
    if recipe.parallel.pp > 1:
        there = replace(site, notes=(*site.notes, note_of(recipe)))
        bound = largest_stage(recipe, there.planner(recipe), there.budget(recipe))
        return replace(bound, stands_because=as_it_stands(recipe))
    cut = recipe.parallel.tp > 1
    planner = free_planner(loaded, site) if how == "fastest" and not cut else site.planner(recipe)
    planner = planner if num_layers is None else planner.with_layers(num_layers)
    if cut:
        return replace(planner.as_it_stands(site.budget(recipe)), stands_because=CUT)
    if how == "fastest":
        found = planner.plan(budget := site.budget(recipe, disk=site.may_use_disk(recipe)))
        if found is None and (with_disk := site.budget(recipe, disk=True)) != budget:
            found = planner.plan(with_disk)
        if found is not None:
            return found
    stands = planner.as_it_stands(site.budget(recipe, disk=on_disk(recipe)))
    if how == "fastest" or recipe.memory.plan == "" or stands.keeps_margin:
        return stands
    if stands.shape.unknown:  # what is known of it may be too much already
        return replace(stands, stands_because=stands.shape.unknown)
    if recipe.memory.layers_per_group > 1:
        return replace(stands, stands_because="layers come in groups (memory.layers_per_group)")
    return _least_change(planner, loaded, site, same_numbers) or stands


def free_planner(loaded: Loaded, site: Site) -> Planner:
    """Make the planner that may decide everything: it looks for the fastest plan of all."""
    loaded = on_machine(loaded, site.machine)
    open_formats = frozenset(name for name in FORMAT_FIELDS if loaded.sources.get(name, DEFAULT) == DEFAULT)
    said = frozenset(name for name, source in loaded.sources.items() if source.startswith((CLI, "env")))
    return site.planner(loaded.recipe, typed(loaded.recipe, said), open_formats)


def variants(loaded: Loaded) -> Iterator[dict[str, Any]]:
    """Decisions of a table of ways where a recipe does not fit as it stands, among settings that are written nowhere:
    fewer bits of the optimizer, and the layer-major executor with delayed clipping, which passes backward once."""
    free = frozenset(loaded.sources) - user_settings(loaded)
    formats = [{}, *(found for found in narrower(loaded.recipe) if set(found) <= free)]
    clips: list[dict[str, Any]] = [{}]
    recipe = loaded.recipe
    clips_later = next((name for name in executors(recipe) if not capabilities_of(name).whole_gradient), None)
    if recipe.optim.clip == "two_pass" and recipe.optim.clip_norm and clips_later is not None:
        sliced = {"memory.executor": clips_later, "optim.clip": "delayed"}
        clips += [sliced, sliced | {"memory.rollback": "checkpoint"}]
    for one, other in itertools.product(formats, clips):
        if (one or other) and set(other) <= free:
            yield {**one, **other}


def user_settings(loaded: Loaded) -> frozenset[str]:
    """Names of the settings that the user has set, which bind a decision: neither defaults nor those of the run's own
    plan."""
    own = DEFAULT, f"plan {PLAN_FILE}", f"plan {AUTO}"
    return frozenset(name for name, source in loaded.sources.items() if source not in own)


def typed_too(loaded: Loaded, settings: Mapping[str, Any]) -> Loaded | None:
    """A recipe to decide on with more settings on its command line; None where they are refused."""
    recipe = accepted(loaded.recipe, settings)
    sources = loaded.sources | dict.fromkeys(settings, CLI)
    return None if recipe is None else replace(loaded, recipe=recipe, sources=sources)


def _least_change(planner: Planner, loaded: Loaded, site: Site, same_numbers: bool) -> Plan | None:
    """Decide with the least change to a recipe: the plan of the first stage that has one; None where nothing fits."""
    recipe, least = planner.recipe, None
    fused = fuses(planner.shape(recipe).compiled, site.machine)
    for number, stage in enumerate(stages(recipe, user_settings(loaded), fused=fused, same_numbers=same_numbers)):
        budget = site.budget(recipe, disk=stage.disk or on_disk(recipe))
        mine = planner.with_beside(stage.beside).with_fixed(stage.fixed, stage.formats)
        found = mine.plan(budget)
        if found is not None:
            return replace(found, least_bytes=least)
        if number == 0:
            smallest = mine.smallest(budget)
            least = smallest.peak_bytes if smallest is not None else 0.0
    return None


def stages(recipe: Recipe, explicit: frozenset[str], *, fused: bool, same_numbers: bool) -> Iterator[Stage]:
    """The stages of a decision, from the recipe as it is to everything that may be decided.

    Args:
        recipe: the run's settings.
        explicit: those of them that the user set.
        fused: see `constraints.fuses`; not all that layers may keep gives the same bits then.
        same_numbers: only what changes no bit, for a run that continues.
    """
    memory, train = recipe.memory, recipe.train
    now = replace(
        written(recipe, explicit),
        executor=memory.executor,
        micro_batch_size=train.micro_batch_size,
        loss_chunk_bytes=memory.loss_chunk_bytes,
        mlp_chunks=memory.mlp_chunks,
        attention_block=memory.attention_block,
    )
    standing = KIND_OF[train.activation_checkpoint] if memory.can.activation_checkpoint else "recompute"
    kinds = same_bits(recipe, fused, standing) & (now.activations or KEPT)
    now = replace(now, activations=None if kinds == KEPT else kinds)
    seen: list[Stage] = []

    def fresh(stage: Stage) -> Iterator[Stage]:
        if stage not in seen:
            seen.append(stage)
            yield stage

    beside = list(_beside(recipe, explicit, same_numbers))
    yield from fresh(Stage(now))
    for settings in beside:
        yield from fresh(Stage(now, beside=settings))
    if same_numbers:
        if memory.can.offload:
            yield from fresh(Stage(now, disk=True))
        return
    now = replace(now, activations=written(recipe, explicit).activations)
    yield from fresh(Stage(now))  # what layers keep, where that changes last bits
    if "train.micro_batch_size" not in explicit:
        now = replace(now, micro_batch_size=None, most_rows=train.micro_batch_size)
        yield from fresh(Stage(now))
    if "memory.loss_chunk_bytes" not in explicit:
        now = replace(now, loss_chunk_bytes=None)
        yield from fresh(Stage(now))
    for settings in beside:
        yield from fresh(Stage(now, beside=settings))
    last, sliced = Stage(now), memory.can.offload
    if not sliced and "memory.executor" not in explicit and "train.activation_checkpoint" not in explicit:
        last, sliced = Stage(replace(now, executor="layer_major")), True
        yield from fresh(last)
    if sliced:
        for name in ("mlp_chunks", "attention_block"):
            if f"memory.{name}" not in explicit:
                last = Stage(replace(last.fixed, **{name: None}))
        yield from fresh(last)
        last = replace(last, disk=True)
        yield from fresh(last)
    if FORMAT_FIELDS - explicit:
        if "memory.executor" not in explicit and "train.activation_checkpoint" not in explicit:
            last = replace(last, fixed=replace(last.fixed, executor=None))
        yield from fresh(replace(last, disk=False, formats=FORMAT_FIELDS - explicit))
        yield from fresh(replace(last, formats=FORMAT_FIELDS - explicit))


def _beside(recipe: Recipe, explicit: frozenset[str], same_numbers: bool) -> Iterator[dict[str, Any]]:
    """Settings that a decision may change of memory beside the steps: each alone, then all of them. A run that
    continues keeps the format of its evaluations, which are compared with each other."""
    found: list[dict[str, Any]] = []
    if written_beside(recipe) and "checkpoint.async_save" not in explicit:
        found.append({"checkpoint.async_save": False})
    if recipe.precision.eval_fp32 and "precision.eval_fp32" not in explicit and not same_numbers:
        found.append({"precision.eval_fp32": False})
    yield from found
    if len(found) > 1:
        yield {name: value for settings in found for name, value in settings.items()}


def departures(recipe: Recipe, plan: Plan) -> tuple[ConfigChange, ...]:
    """Settings in which a decision departs from a recipe, what layers keep and where bytes lie left out."""
    named = (*BESIDE, "memory.executor", "train.micro_batch_size", "memory.loss_chunk_bytes", *sorted(FORMAT_FIELDS))
    found = []
    for name in (*named, "memory.mlp_chunks", "memory.attention_block"):
        before, after = value_of(recipe, name), plan.settings().get(name)
        if after is not None and after != before:
            found.append(ConfigChange(name, before, after))
    return tuple(found)
