"""Changes of a recipe that make it fit, cheapest first, each planned again.

Two kinds: settings that leave the result as it is (smaller micro-batches, recomputation, compiled layers), and
settings that change what is learned or how exactly (8- and 16-bit formats, shorter rows, a smaller model). The first
kind comes first; inside a kind the order is that of seconds per token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.core.config.edit import accepted, value_of
from tilewright.core.config.recipe import Recipe
from tilewright.core.memory_plan import KIND_OF
from tilewright.core.units import format_bytes, format_seconds
from tilewright.planner.cost.shards import Shards
from tilewright.planner.plan import Budget
from tilewright.planner.planner import Planner

NUM_FIXES = 3


@dataclass(frozen=True)
class Fix:
    """One change, and the plan with it. `keeps_result`: the same losses as before, up to rounding."""

    settings: dict[str, Any]
    keeps_result: bool
    fits: bool
    peak_bytes: int
    step_s: float
    token_s: float

    def __str__(self) -> str:
        ends = "" if self.fits else ", still too much"
        return (
            f"{words(self.settings):<44} peak {format_bytes(self.peak_bytes)}, step {format_seconds(self.step_s)}{ends}"
        )


def words(settings: Mapping[str, Any]) -> str:
    """Settings as they are typed."""
    return " ".join(f"--{name} {value}" for name, value in settings.items())


def candidates(recipe: Recipe) -> Iterator[tuple[dict[str, Any], bool]]:
    """Settings worth trying, and whether they keep the result. Alone, and the sparing ones together."""
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
    yield from _other_tiers(recipe)


def _other_tiers(recipe: Recipe) -> Iterator[tuple[dict[str, Any], bool]]:
    """Layer-major: more and more of what waits goes to disk."""
    found: dict[str, Any] = {}
    for name in ("memory.offload_activations", "memory.offload_optimizer", "memory.offload_params"):
        if value_of(recipe, name) != "disk":
            found[name] = "disk"
            yield dict(found), True


def _any_executor(recipe: Recipe) -> Iterator[tuple[dict[str, Any], bool]]:
    for size in _halves(min(recipe.train.micro_batch_size, recipe.train.global_batch_size), 1):
        yield {"train.micro_batch_size": size}, True
        yield from ((found | {"train.micro_batch_size": size}, keeps) for found, keeps in of_shards(recipe, size))
    yield from of_shards(recipe, recipe.train.micro_batch_size)
    modes = list(KIND_OF)
    for mode in modes[modes.index(recipe.train.activation_checkpoint) + 1 :]:
        yield {"train.activation_checkpoint": mode}, True
        if recipe.train.micro_batch_size > 1:
            yield {"train.activation_checkpoint": mode, "train.micro_batch_size": 1}, True
    if recipe.train.checkpoint_inputs == "exact":
        yield {"train.activation_checkpoint": "full", "train.checkpoint_inputs": "fp8"}, False
        yield {**_SPARING, "train.checkpoint_inputs": "fp8"}, False
    if recipe.precision.mode == "bf16_mixed" and recipe.train.activation_checkpoint == "none":
        yield {"precision.mode": "fp8_tile"}, False
    if recipe.precision.mode in ("fp32", "tf32"):
        yield {"precision.mode": "bf16_mixed"}, False
    if recipe.optim.moments == "fp32":
        yield {"optim.moments": "bf16"}, False
    if recipe.optim.moments != "8bit":
        yield {"optim.moments": "8bit"}, False
    if recipe.optim.master_weights == "fp32" and recipe.precision.mode == "bf16_mixed":
        yield {"optim.master_weights": "stochastic"}, False
        yield {"optim.master_weights": "stochastic", "optim.moments": "bf16"}, False
        yield {"optim.master_weights": "split24", "optim.moments": "8bit"}, False
        yield {**_SPARING, "optim.master_weights": "split24", "optim.moments": "8bit"}, False
        yield {**_SPARING, "optim.master_weights": "stochastic", "optim.moments": "8bit"}, False
    if recipe.model.task != "image_classification":
        for length in _halves(recipe.data.seq_len, 128):
            yield {"data.seq_len": length}, False
    if recipe.model.kind != "hf" and not recipe.model.path:
        yield from _smaller_models(recipe)


def of_shards(recipe: Recipe, micro_batch_size: int) -> Iterator[tuple[dict[str, Any], bool]]:
    """What a rank of a sharded run need not hold whole, at the price of communication: layers that stay gathered from
    forward to backward, and gradients from one micro-batch to the next.

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


_SPARING = {"train.activation_checkpoint": "full", "train.micro_batch_size": 1}


def _smaller_models(recipe: Recipe) -> Iterator[tuple[dict[str, Any], bool]]:
    if not recipe.data.tokenizer:
        for size in _halves(recipe.data.vocab_size, 4096):
            yield {"data.vocab_size": size}, False
    for layers in _halves(recipe.model.num_layers, 2):
        yield {"model.num_layers": layers}, False
        yield {**_SPARING, "model.num_layers": layers}, False


def _halves(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def find_fixes(planner: Planner, budget: Budget) -> tuple[Fix, ...]:
    """The cheapest changes that make a recipe fit as it stands then, one for each set of settings; where nothing fits,
    those that save most.

    Args:
        planner: of the recipe, which does not fit.
        budget: of the run.
    """
    found = []
    for settings, keeps in candidates(planner.recipe):
        other = accepted(planner.recipe, settings)
        if other is not None:
            plan = planner.with_recipe(other, settings.get("data.vocab_size")).as_it_stands(budget)
            fits = plan.least_device <= budget.device
            found.append(Fix(settings, keeps, fits, int(plan.peak_bytes), plan.step_s, 1 / plan.tokens_per_s))
    fitting = sorted((fix for fix in found if fix.fits), key=lambda fix: (not fix.keeps_result, fix.token_s))
    if not fitting:
        return tuple(sorted(found, key=lambda fix: fix.peak_bytes)[:NUM_FIXES])
    best: dict[tuple[str, ...], Fix] = {}
    for fix in fitting:
        best.setdefault(tuple(sorted(fix.settings)), fix)
    return tuple(best.values())[:NUM_FIXES]
