"""`tilewright eval`: the held-out loss of a run, by domain, in FP32 whatever the run's precision."""

from pathlib import Path

import click

from tilewright.cli.common import json_option, print_json, run_argument, show_table, verbosity
from tilewright.core.units import format_loss, format_perplexity


@click.command("eval")
@run_argument
@click.option("--batches", type=click.IntRange(1), help="Micro-batches per domain. Default: the run's eval_batches.")
@json_option
@verbosity
def eval_(run: Path, batches: int | None, as_json: bool) -> None:
    """Evaluate a run on its held-out text, in FP32.

    RUN is a run folder or its name below `runs`; without it `runs/latest`.
    """
    from tilewright.cli.load_run import reopen
    from tilewright.training.components.dataset import prepare_data
    from tilewright.training.executor.evaluate import evaluate, pooled

    opened = reopen(run)
    train = opened.recipe.train
    data = prepare_data(opened.recipe)
    held_out = {
        name: data.eval_batches(name, train.micro_batch_size, batches or train.eval_batches) for name in data.domains
    }
    # The model is plain FP32: nothing was converted, so there is no other precision to leave.
    results = evaluate(opened.model, held_out, device=opened.device, fp32=False)
    whole = pooled(results)
    if as_json:
        rows = {name: result.to_json() for name, result in results.items()}
        print_json({"checkpoint": str(opened.checkpoint), "domains": rows, "all": whole and whole.to_json()})
        return
    click.echo(f"{opened.checkpoint}")
    rows = [*results.items(), *([("all", whole)] if whole else [])]
    show_table(
        ("domain", "loss", "perplexity", "targets"),
        [(name, format_loss(result.loss), format_perplexity(result.loss), f"{result.tokens}") for name, result in rows],
    )
