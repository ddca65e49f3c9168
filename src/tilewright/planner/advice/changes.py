"""Changes of a recipe or of a budget that make a run faster, or make it fit, each planned as if it were typed.

A setting that is printed here is one that the same command accepts, and the seconds beside it are those that the
command says then: settings that `train` refuses are left out, and each is planned with itself fixed. Called by
`cli.plan_joint` and `training.planning.resolve`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewright.core.config.recipe import Recipe
from tilewright.core.units import format_bytes, format_count, format_seconds
from tilewright.ops.base.compile import compiles_layers
from tilewright.planner.advice.fixes import of_shards, words
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner

NUM_CHANGES = 3
WORTH = 1.03
"""Times as many tokens per second: what gains less is not worth a change, and is below what the rates are known to."""
IDLE = 0.1
"""Share of the device's budget: a plan that leaves more of it says why."""


Replan = Callable[[Mapping[str, Any], Budget], Plan | None]
"""The plan with other settings, in another budget; None where they are refused, or nothing fits."""


@dataclass(frozen=True)
class Change:
    """One change of recipe or machine, and what a step takes with it. `keeps_result`: the same losses up to rounding.
    `settings`: what to type; empty where it is the machine that changes."""

    what: str
    settings: Mapping[str, Any]
    budget: Budget
    keeps_result: bool
    step_s: float
    tokens_per_s: float

    def __str__(self) -> str:
        learned = "" if self.keeps_result else "; changes what is learned"
        return f"{self.what}: {format_seconds(self.step_s)} a step, {format_count(self.tokens_per_s)} tokens/s{learned}"


def candidates(recipe: Recipe, found: Plan | None) -> Iterator[tuple[dict[str, Any], bool]]:
    """Settings worth trying, and whether they keep the losses. `found`: the plan; None where nothing fits.

    What only one executor does is tried together with it where the recipe has the other.
    """
    if found is None:  # what it costs is communication, which is in no plan's seconds
        yield from of_shards(recipe, 1)
    if recipe.train.checkpoint_inputs == "exact":
        yield {"train.activation_checkpoint": "full", "train.checkpoint_inputs": "fp8"}, False
        yield _in_slices(recipe) | {"train.checkpoint_inputs": "fp8"}, False
    sliced = not recipe.memory.can.whole_gradient
    layer_major = found is None or not found.setting.can.whole_gradient
    if layer_major and recipe.optim.clip == "two_pass" and recipe.optim.clip_norm:
        yield _in_slices(recipe) | {"optim.clip": "delayed"}, False
        yield _in_slices(recipe) | {"optim.clip": "delayed", "memory.rollback": "checkpoint"}, False
    if sliced and recipe.optim.clip == "delayed" and recipe.memory.rollback == "buffer":
        yield {"memory.rollback": "checkpoint"}, True
    if found is None or not found.narrowed:
        if recipe.optim.moments != "8bit":
            yield {"optim.moments": "8bit"}, False
        if recipe.optim.master_weights == "fp32" and recipe.precision.mode == "bf16_mixed":
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
    """Whether layers run eagerly that a compiler which is there could take: those of Hugging Face models."""
    there = compiles_layers("auto", found.machine, by_default=True)
    return recipe.model.kind == "hf" and recipe.train.compile == "auto" and there


def _in_slices(recipe: Recipe) -> dict[str, Any]:
    """What changes a recipe's executor to the layer-major one."""
    if recipe.memory.can.offload:
        return {}
    kept = {} if recipe.train.activation_checkpoint == "none" else {"train.activation_checkpoint": "none"}
    return {"memory.executor": "layer_major"} | kept


def cheapest_changes(recipe: Recipe, budget: Budget, found: Plan | None, replan: Replan) -> list[Change]:
    """The changes that gain most time per token; where nothing fits, those that make it fit.

    Args:
        recipe: the run's settings.
        budget: of the run.
        found: the plan within it; None where nothing fits.
        replan: plans the run as the same command does where the settings are typed too.
    """
    tried = [(words(settings), settings, keeps, budget) for settings, keeps in candidates(recipe, found)]
    tried.append(("half as much device memory again", {}, True, replace(budget, device=1.5 * budget.device)))
    if budget.links.host:
        tried.append(("twice the host memory", {}, True, replace(budget, host=2 * budget.host)))
    changes = []
    for what, settings, keeps, there in tried:
        plan = replan(settings, there)
        if plan is not None and (found is None or plan.tokens_per_s > WORTH * found.tokens_per_s):
            changes.append(Change(what, settings, there, keeps, plan.step_s, plan.tokens_per_s))

    def order(change: Change) -> tuple[bool, float]:  # what makes a run fit and keeps its losses comes first
        return found is not None or not (change.keeps_result and change.settings), -change.tokens_per_s

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
    """Why a plan leaves more than a tenth of the device's memory idle; empty where it does not.

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
