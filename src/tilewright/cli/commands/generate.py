"""`tilewright generate`: continues a text with the model of a run."""

from pathlib import Path

import click

from tilewright.cli.common import SEED, run_argument, verbosity
from tilewright.cli.model_options import sampling_options, threads_option
from tilewright.core.errors import ConfigError


@click.command()
@run_argument
@click.option("--prompt", default="", help="Prompt. Default: start of a document (BOS).")
@click.option("--tokens", default=100, show_default=True, type=click.IntRange(1), help="Maximum number of new tokens.")
@sampling_options(temperature=0.8, top_k=40)
@click.option("--seed", default=1234, show_default=True, type=SEED, help="Random seed.")
@threads_option
@verbosity
def generate(
    run: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int, threads: int | None
) -> None:
    """Continue a text with the model of a run.

    RUN is a run folder or its name below `runs`; without it `runs/latest`.
    """
    import torch

    from tilewright.cli.load_run import reopen
    from tilewright.core.hardware import detect_machine
    from tilewright.models.generate import generate as extend
    from tilewright.precision.mixed import few_row_layers
    from tilewright.training.components.tokenizer_files import TextRules

    opened = reopen(run, threads=threads)
    if opened.recipe.model.task != "causal_lm":
        raise ConfigError(
            "Text generation needs a causal language model",
            got=f'model.task = "{opened.recipe.model.task}"',
            need='model.task = "causal_lm"',
            try_="tilewright eval, for its loss",
            where=str(run / "run.toml"),
        )
    few_row_layers.attach(opened.model, detect_machine())  # type: ignore[arg-type]
    ids = torch.tensor([opened.tokenizer.prompt_ids(prompt)], device=opened.device)
    written = extend(
        opened.model,
        ids,
        tokens,
        temperature=temperature,
        top_k=top_k,
        eos_id=TextRules.of(opened.recipe, run, opened.tokenizer).stops,
        generator=torch.Generator().manual_seed(seed),
    )
    # Together: alone, the tokenizers that mark the beginnings of words would lose the space before the first new one.
    before, text = opened.tokenizer.decode(ids[0].tolist()), opened.tokenizer.decode(written[0].tolist())
    click.echo(prompt + text[len(before) :])
