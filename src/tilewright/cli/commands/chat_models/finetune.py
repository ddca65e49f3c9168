"""`tilewright finetune`: a model, conversations, and the same training as `tilewright train` with a recipe for it."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.cli.commands.train import train_and_judge
from tilewright.cli.common import FiniteRange, RecipeCommand, gc_paused, overrides, verbosity
from tilewright.core.config.load import Loaded
from tilewright.core.errors import ConfigError
from tilewright.core.log import say

if TYPE_CHECKING:
    from tilewright.training.assemble import RunContext

_WORDS = {
    "lora": "LoRA on a BF16 base",
    "lora_fp8": "LoRA on an FP8 base",
    "full": "all parameters",
}


@click.command(cls=RecipeCommand)
@click.argument("model")
@click.argument("data", nargs=-1)
@click.option(
    "--how",
    type=click.Choice(list(_WORDS)),
    default="lora",
    show_default=True,
    help="Adapters on a BF16 or an FP8 base, or all parameters.",
)
@click.option(
    "--passes",
    type=FiniteRange(0, min_open=True),
    default=3,
    show_default=True,
    help="Passes over the data, where neither --train.steps nor --train.minutes is given.",
)
@click.option("--dry-run", is_flag=True, help="Run two steps, compare planned with measured, keep nothing.")
@verbosity
@click.pass_context
def finetune(ctx: click.Context, model: str, data: tuple[str, ...], how: str, passes: float, dry_run: bool) -> None:
    """Fine-tune a model on your conversations; continue where the run stopped.

    MODEL is a folder, or a model of the Hugging Face Hub, org/name[@revision]. DATA are files or folders of
    conversations: .jsonl, .json, .csv or .parquet with rows of messages, ShareGPT, Alpaca, or prompt and completion.
    The assistant's answers are learned. At the end the run folder holds the adapter in peft's layout, or the model.
    """
    if not data:
        raise ConfigError(
            "No conversations named",
            got=f"tilewright finetune {model}",
            need="a file or folder of conversations behind the model",
            try_=f"tilewright finetune {model} conversations.jsonl",
            where="DATA",
        )
    # These import torch, which `--help` and a command without conversations do without.
    with gc_paused():
        from tilewright.cli.commands.chat_models.tuned_recipe import check_shapes, tuned_recipe, with_passes
        from tilewright.data.dataset.prepared_text import PreparedData
        from tilewright.training.components.recipe_data import prepare_data

    # 1. The recipe. Pairs of preferences are refused first: another recipe learns them.
    check_shapes(model, data, how, overrides(ctx))
    loaded, _ = tuned_recipe(model, data, how, overrides(ctx))
    for note in loaded.notes:
        say(f"note: {note}")
    section = loaded.recipe.model
    code = "tilewright's decoder" if section.kind != "hf" else "transformers' code"
    say(f"model: {section.path}, run by {code}; {_WORDS[how]}")
    # 2. The data, before the number of steps is known: passes are counted in prepared rows.
    prepared = prepare_data(loaded.recipe)
    assert isinstance(prepared, PreparedData)
    loaded = with_passes(loaded, prepared, passes)
    train, rows = loaded.recipe.train, prepared.full_rows
    said = f"as many as fit into {train.minutes:g} minutes, each"
    size = f"of {train.global_batch_size} rows of {loaded.recipe.data.seq_len} tokens"
    if train.steps:
        said = f"{train.steps}"
        size += f", {train.steps * train.global_batch_size / max(1, rows):.2g} passes over {rows} rows"
    say(f"steps: {said} {size}")
    # 3. From here on it is `tilewright train` with that recipe.
    result = train_and_judge(loaded, dry_run, _tell_plan)
    if result.run_dir is not None and result.stopped is None:
        _next(loaded, result.run_dir)


def _tell_plan(setup: "RunContext") -> None:
    say(f"plan: {setup.plan.verdict}")


def _next(loaded: Loaded, run: Path) -> None:
    """After `finetune`, next: where the result is, and what can be done with it."""
    shown = Path(loaded.recipe.run.dir) / run.name
    adapted = bool(loaded.recipe.lora.rank)
    say(f"{'adapter' if adapted else 'model'}: {shown / 'hf'}")
    say(f"next   tilewright chat {shown}      talk to it")
    if adapted:
        say(f"next   tilewright merge {shown} --out FOLDER      the whole model as a Hugging Face folder")
