"""`tilewright data`: datasets that are built from raw files, and what is in them."""

import click

from tilewright.cli.commands.datasets.build import build
from tilewright.cli.commands.datasets.inspect import inspect_data
from tilewright.cli.commands.datasets.skip import skip_data


@click.group(invoke_without_command=True)
@click.pass_context
def data(ctx: click.Context) -> None:
    """Build a dataset from raw files, look into one, and leave samples out."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


data.add_command(build)
data.add_command(inspect_data)
data.add_command(skip_data)
