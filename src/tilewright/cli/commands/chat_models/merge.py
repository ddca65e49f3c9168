"""`tilewright merge`: the model of a run as a Hugging Face folder that everything else reads."""

from pathlib import Path

import click

from tilewright.cli.common import PathName, run_argument, verbosity
from tilewright.core.errors import CheckpointError
from tilewright.core.log import say
from tilewright.core.units import format_bytes


@click.command()
@run_argument
@click.option("--out", required=True, type=PathName(), help="Output folder; new, or empty.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["bf16", "fp32", "fp8"]),
    default="bf16",
    show_default=True,
    help="Format of the weights; the sum of weight and adapter is made in FP32.",
)
@verbosity
def merge(run: Path, out: Path, format_: str) -> None:
    """Write the model of a run, its adapters merged, as a Hugging Face folder.

    RUN is a run folder or its name below `runs`; without it `runs/latest`. The folder holds the tokenizer and the chat
    template too, and loads in transformers. In FP8 small adapters may vanish in the rounding.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            "Output folder is not empty",
            got=str(out),
            need="a new folder: files there might be taken for a part of the model",
            try_=f"--out {out}-2",
            where="--out",
        )
    import torch

    from tilewright.cli.load_run import reopen
    from tilewright.precision.lora.lora import merge_lora
    from tilewright.training.components.export import config_keys, write_beside
    from tilewright.training.components.tokenizer_files import TextRules

    opened = reopen(run, "cpu", rounded=False)
    rules = TextRules.of(opened.recipe, run, opened.tokenizer)
    merged = merge_lora(opened.model)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}[format_]
    opened.model.save_hf(out, dtype=dtype, extra=config_keys(opened.recipe, opened.tokenizer, rules))
    write_beside(opened.recipe, run, opened.model, rules, out)
    size = sum(file.stat().st_size for file in out.iterdir())
    what = f"{len(merged)} layers merged" if merged else "a run without adapters"
    say(f"wrote {out}: {what}, {format_bytes(size)} in {format_.upper()}, from {opened.checkpoint.name}")
