"""`tilewright report`: writes the report of a run folder, finished or still running."""

import webbrowser
from pathlib import Path

import click

from tilewright.cli.common import run_argument, verbosity
from tilewright.core.errors import ConfigError


@click.command()
@run_argument
@click.option("--open", "open_", is_flag=True, help="Open it in a browser.")
@verbosity
def report(run: Path, open_: bool) -> None:
    """Write a run's report: one HTML file that opens offline.

    RUN is a run folder or its name below `runs`; without it `runs/latest`.
    """
    from tilewright.report.page import write_report

    page = write_report(run).resolve()
    click.echo(page)
    if open_ and not webbrowser.open(page.as_uri()):
        raise ConfigError("no browser could be started here", got=str(page), need="a browser", try_="open it yourself")
