"""`tilewright data skip`: leave out the samples of some steps of a run, after a spike of its loss."""

import re

import click

from tilewright.cli.common import echo, find_run, verbosity

_STEPS = re.compile(r"(\d{1,9}):(\d{1,9})")


@click.command("skip")
@click.argument("run")
@click.option("--steps", required=True, metavar="A:B", help="First and last step whose samples are left out.")
@verbosity
@click.pass_context
def skip_data(ctx: click.Context, run: str, steps: str) -> None:
    """Leave out the samples that a run's steps A to B were trained on.

    RUN is stopped, and its newest checkpoint is of a step before A: remove later ones. Samples are left out by their
    number, so another number of processes leaves out the same; `data inspect --run RUN --step N` lists them first.
    """
    found = _STEPS.fullmatch(steps)
    if found is None:
        raise click.UsageError(f"--steps {steps} is not A:B, the first and the last step, as in --steps 990:1004.", ctx)
    from tilewright.training.components.run_samples import skip_steps

    folder = find_run(run)
    start, stop = skip_steps(folder, int(found[1]), int(found[2]))
    echo(f"{folder}: samples {start:,} to {stop - 1:,} are left out when the run continues")
