"""`tilewright watch`: the report of one or more runs, live in the browser."""

from pathlib import Path

import click

from tilewright.cli.common import find_run, open_in_browser, verbosity
from tilewright.core.log import say

DEFAULT_PORT = 8810


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="First port to try; the next free one is used. 0: any free port.",
)
@click.option("--open", "open_", is_flag=True, help="Open the page in a browser.")
@verbosity
def watch(runs: tuple[str, ...], port: int, open_: bool) -> None:
    """Show runs live in the browser: curves over each other, differing settings, load of the machine.

    The page is served to this machine only (127.0.0.1), and reads the run folders. It offers other runs of the same
    folders, new ones too. Ctrl-C ends the command; runs are not affected.

    RUN is a run folder or its name below `runs`; without it `runs/latest`.
    """
    folders = [find_run(name) for name in runs or ("runs/latest",)]
    _serve(folders, port, open_)


def _serve(folders: list[Path], port: int, open_: bool) -> None:
    from tilewright.report.watch.server import WatchServer

    with WatchServer(folders, port) as server:
        if port not in (0, server.server_port):
            say(f"port {port} is in use: {server.server_port} instead", error=True)
        click.echo(server.url)
        try:
            if open_:
                open_in_browser(server.url)
            say("Ctrl-C ends it")
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")
