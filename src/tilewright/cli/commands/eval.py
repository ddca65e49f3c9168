"""`tilewright eval`: the held-out loss of a run, by domain, in FP32 whatever the run's precision."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.cli.common import json_option, print_json, run_argument, show_table, verbosity
from tilewright.core.units import format_bits, format_loss, format_perplexity
from tilewright.data.corpus.compressors import COMPRESSORS, pooled_bits

if TYPE_CHECKING:
    from tilewright.training.executor.evaluate import DomainLoss


@click.command("eval")
@run_argument
@click.option("--batches", type=click.IntRange(1), help="Micro-batches per domain. Default: the run's eval_batches.")
@json_option
@verbosity
def eval_(run: Path, batches: int | None, as_json: bool) -> None:
    """Evaluate a run on its held-out text, in FP32.

    Bits per byte do not depend on the tokenizer: what gzip and xz need for the same text stands beside them.

    RUN is a run folder or its name below `runs`; without it `runs/latest`.
    """
    from tilewright.cli.load_run import reopen
    from tilewright.training.components.dataset import held_out, prepare_data
    from tilewright.training.executor.evaluate import evaluate, pooled

    opened = reopen(run)
    data = prepare_data(opened.recipe)
    rows = held_out(opened.recipe, data, batches)
    # The model is plain FP32: nothing was converted, so there is no other precision to leave.
    results = evaluate(opened.model, rows.batches, num_bytes=rows.num_bytes, device=opened.device, fp32=False)
    whole = pooled(results)
    marks = {name: data.compressors(name) for name in results}
    if as_json:
        rows = {name: result.to_json() | {"compressors": marks[name]} for name, result in results.items()}
        print_json({"checkpoint": str(opened.checkpoint), "domains": rows, "all": whole and whole.to_json()})
        return
    click.echo(f"{opened.checkpoint}")
    rows = [*results.items(), *([("all", whole)] if whole else [])]
    if any(result.bits_per_byte is None for result in results.values()):
        columns = ("domain", "loss", "perplexity", "targets")
        show_table(columns, [(name, *_losses(result), f"{result.tokens}") for name, result in rows])
        return
    marks["all"] = pooled_bits(marks, {name: result.bytes or 0 for name, result in results.items()})
    show_table(
        ("domain", "bits per byte", *(f"{name} -9" for name in COMPRESSORS), "loss", "perplexity", "targets"),
        [
            (name, format_bits(result.bits_per_byte or 0.0), *_marks(marks[name]), *_losses(result), f"{result.tokens}")
            for name, result in rows
        ],
    )


def _losses(result: "DomainLoss") -> tuple[str, str]:
    return format_loss(result.loss), format_perplexity(result.loss)


def _marks(bits: Mapping[str, float]) -> list[str]:
    return [format_bits(bits[name]) if name in bits else "" for name in COMPRESSORS]
