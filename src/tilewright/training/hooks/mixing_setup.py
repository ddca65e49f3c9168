"""Makes the hook of `[data.mixing]`: base weights, a mixer, and an evaluation on rotating held-out batches."""

from collections.abc import Mapping

from tilewright.data.batches.rank_sums import SumsOfRanks
from tilewright.data.dataset.prepared_text import PreparedData
from tilewright.data.mixing.choose_mixer import mixer_of
from tilewright.data.mixing.mixing_policy import shares
from tilewright.training.assemble import Components, RunContext
from tilewright.training.executor.evaluate import evaluate
from tilewright.training.hooks.mixing_hook import MixingHook
from tilewright.training.hooks.step_hook import StepHook


def mixing_hooks(setup: RunContext, parts: Components) -> tuple[StepHook, ...]:
    """Set up the hook for mixing; nothing where nothing is mixed.

    Args:
        setup: of the run.
        parts: of the run, before its checkpoint is loaded.

    Raises:
        ConfigError: see `mixer_of`.
    """
    section = setup.recipe.data.mixing
    if section.policy == "off":
        return ()
    recipe, prepared = setup.recipe, setup.prepared
    tokens: Mapping[str, float] = prepared.num_rows  # rows have equal tokens
    if isinstance(prepared, PreparedData) and recipe.data.rows == "documents":
        tokens = prepared.num_tokens
    given = recipe.data.weights or tokens
    weighed = {name: float(given.get(name, 0.0)) for name in prepared.num_rows}
    if section.policy != "schedule":  # what a user gives nothing gets nothing from a policy
        weighed = {name: weight for name, weight in weighed.items() if weight}
    base, tokens = shares(weighed), {name: tokens[name] for name in weighed}
    batches = parts.held_out.batches
    data, fp32 = setup.world.data.handle, recipe.precision.eval_fp32

    def losses(number: int) -> dict[str, float]:
        """Losses of the next held-out batches for mixing, around and around."""
        num = section.eval_batches
        turn = {
            name: [rows[(number * num + i) % len(rows)] for i in range(min(num, len(rows)))]
            for name, rows in batches.items()
            if rows and name in base
        }
        parts.heap.give_back()
        with parts.executor.access.forward_passes(parts.model):
            found = evaluate(parts.model, turn, device=setup.device, fp32=fp32, data=data)
        parts.heap.give_back()
        return {name: one.loss for name, one in found.items()}

    return (
        MixingHook(
            mixer_of(section, base, tokens, prepared.eval_domains),
            parts.stream,
            SumsOfRanks(parts.stream, setup.world, setup.device),
            losses,
            base,
            steps=recipe.train.steps,
            interval=section.interval,
        ),
    )
