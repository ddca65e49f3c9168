"""`tilewright report`: judges a run, finished or still going, and writes its report."""

from pathlib import Path

import click

from tilewright.cli.common import open_in_browser, run_argument, verbosity
from tilewright.core.log import say


@click.command()
@run_argument
@click.option("--open", "open_", is_flag=True, help="Open the report in a browser.")
@verbosity
def report(run: Path, open_: bool) -> None:
    """Judge a run and write its report: one HTML file that opens offline.

    The verdict is printed in one line before the path of the report; --quiet leaves it out.

    RUN is a run folder or its name below `runs`; without it `runs/latest`.
    """
    from tilewright.report.page import write_report
    from tilewright.report.run_data.collect_run import collect
    from tilewright.report.summary import learned
    from tilewright.report.verdict.judge import judge

    data = collect(run)
    judgement = judge(data)
    page = write_report(run, data, judgement).resolve()
    say(judgement.line(learned(data)))
    click.echo(page)
    if open_:
        open_in_browser(page.as_uri())
