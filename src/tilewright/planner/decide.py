"""`memory.plan = "auto"`: the plan that changes a recipe least and fits.

What a recipe says is fixed; what it leaves at its default is decided. In stages, each of which may change more of what
a run computes than the one before: what layers keep and where bytes lie (no bit of a loss), what is beside the
steps (a checkpoint's copy, the format of evaluations), then micro-batches, the loss tile, the executor (rounding), and
at last the optimizer's formats (what is learned). The first stage with a plan that fits is taken, and in it the fastest
plan.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.core.config.edit import on_machine, value_of
from tilewright.core.config.load import CLI, DEFAULT, Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.memory_plan import KIND_OF, Activations
from tilewright.core.units import format_bytes
from tilewright.planner.cost.phases import written_beside
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.constraints import BESIDE, KEPT, Constraints, same_bits
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner

FORMATS = frozenset(("optim.moments", "optim.master_weights"))


@dataclass(frozen=True)
class Stage:
    """What may be decided. `disk`: bytes may be there; `formats`: the optimizer's may be narrowed; `beside`: settings
    that no step reads, changed."""

    fixed: Constraints
    disk: bool = False
    formats: frozenset[str] = frozenset()
    beside: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfigChange:
    """A setting that is not what the recipe has."""

    name: str
    before: object
    after: object


@dataclass(frozen=True)
class AutoPlan:
    """A plan, and what it took to find one."""

    plan: Plan
    departures: tuple[ConfigChange, ...]
    least_bytes: float | None
    """The least that a step takes with what the recipe says, where that did not fit."""

    @property
    def reason(self) -> str:
        """Why the recipe was departed from; empty where it was not."""
        if self.least_bytes is None:
            return ""
        budget, margin = self.plan.budget.device, self.plan.recipe.plan.margin
        least = format_bytes(self.least_bytes) if self.least_bytes else "more than the host has"
        return (
            f"with what the recipe says a step takes {least} at least, and {format_bytes((1 - margin) * budget)} of "
            f"{format_bytes(budget)} may be used (plan.margin {margin:g})"
        )


def written(recipe: Recipe, explicit: frozenset[str]) -> Constraints:
    """What the user set of what is decided layer by layer. An executor says nothing of what layers keep.

    Args:
        recipe: the run's settings.
        explicit: those of them that were written down.
    """
    memory = recipe.memory
    parameters, states, inputs = memory.tiers
    kept: Activations | None = None
    if memory.executor == "standard" and "train.activation_checkpoint" in explicit:
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
    """What the user set of everything that is decided.

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


def planner_of(
    loaded: Loaded, vocab_size: int, machine: Machine, rates: Ceilings, notes: tuple[str, ...] = ()
) -> Planner:
    """The planner of a command: what is typed, or set by a variable of the environment, is fixed, and the optimizer's
    formats are open where nobody wrote them down.

    Args:
        loaded: the recipe.
        vocab_size: of the tokenizer.
        machine: where it would run.
        rates: of the machine.
        notes: what the caller knows of the rates.
    """
    loaded = on_machine(loaded, machine)
    open_formats = frozenset(name for name in FORMATS if loaded.sources.get(name, DEFAULT) == DEFAULT)
    said = frozenset(name for name, source in loaded.sources.items() if source.startswith((CLI, "env")))
    fixed = typed(loaded.recipe, said)
    return Planner(loaded.recipe, vocab_size, machine, rates, open_formats, notes, fixed)


def stages(recipe: Recipe, explicit: frozenset[str], *, fused: bool, same_numbers: bool) -> Iterator[Stage]:
    """From the recipe as it stands to everything that may be decided.

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
    standing = KIND_OF[train.activation_checkpoint] if memory.executor == "standard" else "recompute"
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
        if memory.executor == "layer_major":
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
    last, sliced = Stage(now), memory.executor == "layer_major"
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
    if FORMATS - explicit:
        if "memory.executor" not in explicit and "train.activation_checkpoint" not in explicit:
            last = replace(last, fixed=replace(last.fixed, executor=None))
        yield from fresh(replace(last, disk=False, formats=FORMATS - explicit))
        yield from fresh(replace(last, formats=FORMATS - explicit))


def _beside(recipe: Recipe, explicit: frozenset[str], same_numbers: bool) -> Iterator[dict[str, Any]]:
    """Settings of what takes memory beside the steps: each alone, then all of them. A run that continues keeps the
    format of its evaluations, which are compared with each other."""
    found: list[dict[str, Any]] = []
    if written_beside(recipe) and "checkpoint.async_save" not in explicit:
        found.append({"checkpoint.async_save": False})
    if recipe.precision.eval_fp32 and "precision.eval_fp32" not in explicit and not same_numbers:
        found.append({"precision.eval_fp32": False})
    yield from found
    if len(found) > 1:
        yield {name: value for settings in found for name, value in settings.items()}


def decide(
    planner: Planner, explicit: frozenset[str], budget: Budget, disk: Callable[[], Budget], **how: bool
) -> AutoPlan | None:
    """The plan of the first stage that has one; None where nothing fits.

    Args:
        planner: of the recipe.
        explicit: settings that the user set.
        budget: without a disk.
        disk: the budget with one; measures it.
        how: see `stages`.
    """
    recipe, least, wide = planner.recipe, None, None
    for number, stage in enumerate(stages(recipe, explicit, **how)):
        if stage.disk:
            wide = wide or disk()
        mine = planner.with_beside(stage.beside).with_fixed(stage.fixed, stage.formats)
        here = wide if stage.disk and wide is not None else budget
        found = mine.plan(here)
        if found is not None:
            return AutoPlan(found, departures(recipe, found), least)
        if number == 0:
            smallest = mine.smallest(here)
            least = smallest.peak_bytes if smallest is not None else 0.0
    return None


def departures(recipe: Recipe, plan: Plan) -> tuple[ConfigChange, ...]:
    """Settings in which a plan differs from a recipe, what layers keep and where bytes lie left out."""
    named = (*BESIDE, "memory.executor", "train.micro_batch_size", "memory.loss_chunk_bytes", *sorted(FORMATS))
    found = []
    for name in (*named, "memory.mlp_chunks", "memory.attention_block"):
        before, after = value_of(recipe, name), plan.settings().get(name)
        if after is not None and after != before:
            found.append(ConfigChange(name, before, after))
    return tuple(found)
