"""Changes of a recipe, or of its machine, that make a run fit or faster, each with the plan that it then has.

Settings that are printed are accepted by the same command, and the seconds beside them are those that it says then:
what `train` refuses is left out, and each is planned as if it were typed. `to_fit` is about a recipe that runs as it
stands; `cheapest_changes` about what the planner, which decides all that a recipe leaves open, cannot decide by itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewright.core.config.change_recipe import accepted, value_of
from tilewright.core.config.recipe import Recipe
from tilewright.core.memory_plan import KIND_OF
from tilewright.core.units import format_bytes, format_seconds
from tilewright.ops.base.compile import compiles_layers
from tilewright.planner.cost.rank_share import Shards
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner

NUM_CHANGES = 3
WORTH = 1.03
"""Times as many tokens per second: what gains less is not worth a change, and is below what the rates are known to."""
IDLE = 0.1
"""Share of the device's budget: a plan that leaves more of it says why."""
Candidate = tuple[dict[str, Any], bool]
"""Settings worth trying, and whether they keep the losses up to rounding."""


@dataclass(frozen=True)
class Change:
    """One change, and the plan with it. `keeps_result`: the same losses up to rounding."""

    settings: Mapping[str, Any]
    """What to type; empty where it is the machine that changes."""
    keeps_result: bool
    plan: Plan
    machine: str = ""
    """What of it changes, in words."""

    @property
    def fits(self) -> bool:
        """True if the run with this change of the recipe is accepted in its budget."""
        return self.plan.least_device <= self.plan.budget.device

    def __str__(self) -> str:
        learned = "" if self.keeps_result else "; changes what is learned"
        ends = "" if self.fits else "; still too much"
        peak = format_bytes(self.plan.peak_bytes)
        return f"{self.machine or words(self.settings)}: {self.plan.speed}, {peak} on the device{learned}{ends}"


def words(settings: Mapping[str, Any]) -> str:
    """Changed settings of an advised change, as they are typed."""
    return " ".join(f"--{name} {value}" for name, value in settings.items())


# ---- what is tried ----


def candidates(recipe: Recipe, found: Plan | None) -> Iterator[Candidate]:
    """List changes that the planner cannot decide by itself. `found`: its plan; None where nothing fits.

    What only one executor does is tried together with it where the recipe has the other.
    """
    optim, sliced = recipe.optim, not recipe.memory.can.whole_gradient
    if found is None:  # what it costs is communication, which is in no plan's seconds
        yield from of_shards(recipe, 1)
    if recipe.train.checkpoint_inputs == "exact":
        yield {"train.activation_checkpoint": "full", "train.checkpoint_inputs": "fp8"}, False
        yield _in_slices(recipe) | {"train.checkpoint_inputs": "fp8"}, False
    layer_major = found is None or not found.setting.can.whole_gradient
    if layer_major and optim.clip == "two_pass" and optim.clip_norm:
        yield _in_slices(recipe) | {"optim.clip": "delayed"}, False
        yield _in_slices(recipe) | {"optim.clip": "delayed", "memory.rollback": "checkpoint"}, False
    if sliced and optim.clip == "delayed" and recipe.memory.rollback == "buffer":
        yield {"memory.rollback": "checkpoint"}, True
    if found is None or not found.narrowed:
        if optim.moments != "8bit":
            yield {"optim.moments": "8bit"}, False
        if optim.master_weights == "fp32" and recipe.precision.mode == "bf16_mixed":
            yield {"optim.master_weights": "stochastic", "optim.moments": "8bit"}, False
    if recipe.precision.mode == "bf16_mixed":
        yield {"precision.mode": "fp8_tile"}, False
    if found is not None and _could_compile(recipe, found):
        yield {"train.compile": "on"}, True
    if found is None and recipe.train.global_batch_size > 1:
        half = recipe.train.global_batch_size // 2
        rows = {"train.micro_batch_size": half} if recipe.train.micro_batch_size > half else {}
        yield {"train.global_batch_size": half} | rows, False
    if found is None and recipe.data.seq_len >= 256:
        yield {"data.seq_len": recipe.data.seq_len // 2}, False


def _could_compile(recipe: Recipe, found: Plan) -> bool:
    """True if `train.compile` is a change to advise: layers of Hugging Face models run eagerly and a compiler is
    there."""
    there = compiles_layers("auto", found.machine, by_default=True)
    return recipe.model.kind == "hf" and recipe.train.compile == "auto" and there


def _in_slices(recipe: Recipe) -> dict[str, Any]:
    """The change to the layer-major executor as settings, advised where a recipe does not fit."""
    if recipe.memory.can.offload:
        return {}
    kept = {} if recipe.train.activation_checkpoint == "none" else {"train.activation_checkpoint": "none"}
    return {"memory.executor": "layer_major"} | kept


def of_shards(recipe: Recipe, micro_batch_size: int) -> Iterator[Candidate]:
    """Advised changes with which a rank of a sharded run holds less, at the price of communication: layers that stay
    gathered from forward to backward, and gradients from one micro-batch to the next.

    Args:
        recipe: with the number of shards.
        micro_batch_size: with fewer rows per step than that there is one micro-batch.
    """
    shards = Shards.of(recipe)
    found: dict[str, Any] = {}
    if shards.cut and not shards.reshard:
        found["parallel.reshard_after_forward"] = True
        yield dict(found), True
    if shards.cut and not shards.reduce_each and shards.rows(recipe) > micro_batch_size:
        yield {"parallel.reduce_each": True}, True
        if found:
            yield found | {"parallel.reduce_each": True}, True


def of_all(recipe: Recipe) -> Iterator[Candidate]:
    """List the advised changes to a recipe for which nothing is decided: all of them, each alone, and the memory-saving
    ones together."""
    if not recipe.memory.can.offload:
        yield from _any_executor(recipe)
        sliced = {"memory.executor": "layer_major", "train.activation_checkpoint": "none"}
        yield sliced, True
        yield sliced | {"optim.moments": "8bit"}, False
        return
    for settings, keeps in _any_executor(recipe):
        settings = {name: value for name, value in settings.items() if name != "train.activation_checkpoint"}
        if settings and settings != {"train.micro_batch_size": recipe.train.micro_batch_size}:
            yield settings, keeps
    tiers: dict[str, Any] = {}
    for name in ("memory.offload_activations", "memory.offload_optimizer", "memory.offload_params"):
        if value_of(recipe, name) != "disk":  # more and more of what waits
            tiers[name] = "disk"
            yield dict(tiers), True


def _any_executor(recipe: Recipe) -> Iterator[Candidate]:
    train, optim, mode = recipe.train, recipe.optim, recipe.precision.mode
    # 1. Smaller micro-batches, more shards, more recomputation: most of these keep the result.
    sparing = {"train.activation_checkpoint": "full", "train.micro_batch_size": 1}
    for size in _halves(min(train.micro_batch_size, train.global_batch_size), 1):
        yield {"train.micro_batch_size": size}, True
        yield from ((found | {"train.micro_batch_size": size}, keeps) for found, keeps in of_shards(recipe, size))
    yield from of_shards(recipe, train.micro_batch_size)
    modes = list(KIND_OF)
    for less in modes[modes.index(train.activation_checkpoint) + 1 :]:
        yield {"train.activation_checkpoint": less}, True
        if train.micro_batch_size > 1:
            yield {"train.activation_checkpoint": less, "train.micro_batch_size": 1}, True
    # 2. Fewer bits: kept inputs, matmuls, optimizer states, master weights.
    if train.checkpoint_inputs == "exact":
        yield {"train.activation_checkpoint": "full", "train.checkpoint_inputs": "fp8"}, False
        yield {**sparing, "train.checkpoint_inputs": "fp8"}, False
    if mode == "bf16_mixed" and train.activation_checkpoint == "none":
        yield {"precision.mode": "fp8_tile"}, False
    if mode in ("fp32", "tf32"):
        yield {"precision.mode": "bf16_mixed"}, False
    if optim.moments == "fp32":
        yield {"optim.moments": "bf16"}, False
    if optim.moments != "8bit":
        yield {"optim.moments": "8bit"}, False
    if optim.master_weights == "fp32" and mode == "bf16_mixed":
        yield {"optim.master_weights": "stochastic"}, False
        yield {"optim.master_weights": "stochastic", "optim.moments": "bf16"}, False
        yield {"optim.master_weights": "split24", "optim.moments": "8bit"}, False
        yield {**sparing, "optim.master_weights": "split24", "optim.moments": "8bit"}, False
        yield {**sparing, "optim.master_weights": "stochastic", "optim.moments": "8bit"}, False
    # 3. Changes of the run itself: rows, vocabulary, layers. A loaded model keeps its shape.
    if recipe.model.task != "image_classification":
        yield from (({"data.seq_len": length}, False) for length in _halves(recipe.data.seq_len, 128))
    if recipe.model.kind == "hf" or recipe.model.path:
        return
    if not recipe.data.tokenizer:
        yield from (({"data.vocab_size": size}, False) for size in _halves(recipe.data.vocab_size, 4096))
    for layers in _halves(recipe.model.num_layers, 2) if not recipe.model.layers else ():
        yield {"model.num_layers": layers}, False
        yield {**sparing, "model.num_layers": layers}, False


def _halves(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


# ---- what is offered ----


def to_fit(planner: Planner, budget: Budget) -> tuple[Change, ...]:
    """Find the cheapest changes that make a recipe fit, one for each set of settings; where nothing fits, those that
    save most memory.

    Args:
        planner: of the recipe, which does not fit.
        budget: of the run.
    """
    found = []
    for settings, keeps in of_all(planner.recipe):
        other = accepted(planner.recipe, settings)
        if other is not None:
            plan = planner.with_recipe(other, settings.get("data.vocab_size")).as_it_stands(budget)
            found.append(Change(settings, keeps, plan))
    fitting = sorted(
        (one for one in found if one.fits), key=lambda one: (not one.keeps_result, 1 / one.plan.tokens_per_s)
    )
    if not fitting:
        return tuple(sorted(found, key=lambda one: int(one.plan.peak_bytes))[:NUM_CHANGES])
    best: dict[tuple[str, ...], Change] = {}
    for one in fitting:
        best.setdefault(tuple(sorted(one.settings)), one)
    return tuple(best.values())[:NUM_CHANGES]


def cheapest_changes(
    recipe: Recipe, budget: Budget, found: Plan | None, replan: Callable[[Mapping[str, Any], Budget], Plan | None]
) -> list[Change]:
    """Find the changes that save most time per token; where nothing fits, those that make the recipe fit.

    Args:
        recipe: the run's settings.
        budget: of the run.
        found: the plan within it; None where nothing fits.
        replan: plans the run as the same command does where the settings are typed too, in another budget; None where
            they are refused, or nothing fits.
    """
    tried = [(settings, keeps, "", budget) for settings, keeps in candidates(recipe, found)]
    tried.append(({}, True, "1.5x the device memory", replace(budget, device=1.5 * budget.device)))
    if budget.links.host:
        tried.append(({}, True, "twice the host memory", replace(budget, host=2 * budget.host)))
    changes = []
    for settings, keeps, machine, there in tried:
        plan = replan(settings, there)
        if plan is not None and (found is None or plan.tokens_per_s > WORTH * found.tokens_per_s):
            changes.append(Change(settings, keeps, plan, machine))

    def order(change: Change) -> tuple[bool, float]:  # what makes a run fit and keeps its losses comes first
        return found is not None or not (change.keeps_result and change.settings), -change.plan.tokens_per_s

    return sorted(changes, key=order)[:NUM_CHANGES]


NAMES = {
    "executor": "memory.executor",
    "micro_batch_size": "train.micro_batch_size",
    "loss_chunk_bytes": "memory.loss_chunk_bytes",
    "activations": "train.activation_checkpoint",
    "parameters": "memory.offload_params",
    "states": "memory.offload_optimizer",
    "inputs": "memory.offload_activations",
    "mlp_chunks": "memory.mlp_chunks",
    "attention_block": "memory.attention_block",
}
"""What is typed of what a plan decides, by the name in `Constraints`."""


def idle_memory(planner: Planner, plan: Plan) -> str:
    """Explain why a plan leaves more than a tenth of the device's memory idle; empty if it does not.

    Each typed setting is left out in turn: the first without which a step is faster is the reason.
    """
    idle = (1 - plan.recipe.plan.margin) * plan.budget.device - plan.peak_bytes
    if idle < IDLE * plan.budget.device:
        return ""
    said = f"{format_bytes(idle)} of the device's memory stay idle: "
    for field, name in NAMES.items():
        if getattr(planner.fixed, field) is None:
            continue
        other = planner.with_fixed(replace(planner.fixed, **{field: None}), planner.open_formats)
        free = other.plan(plan.budget)
        if free is not None and free.tokens_per_s > WORTH * plan.tokens_per_s:
            return f"{said}{name} is given, and without it a step takes {format_seconds(free.step_s)}"
    return f"{said}nothing that this plan may choose is faster with more of it"
