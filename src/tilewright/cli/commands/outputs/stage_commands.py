"""The common parts of `compress` and `search`: the folder of their stages beside a run, lines while they work, their
page."""

from pathlib import Path

from tilewright.cli.common import find_run, is_run
from tilewright.core.log import say


def folder_beside(run: str, made: str) -> Path:
    """Folder of stages' commands (`compress`, `search`) by default: beside a run, or below `runs` for a model.

    Args:
        run: as typed.
        made: what becomes of it, which ends the name.

    Example:
        >>> folder_beside("org/model@main", "searched").as_posix()
        'runs/model-searched'
    """
    if is_run(run):
        folder = find_run(run).resolve()
        return folder.with_name(f"{folder.name}-{made}")
    return Path("runs") / f"{Path(run).expanduser().name.partition('@')[0]}-{made}"


def say_aside(text: str) -> None:
    """Say aside, in stages' commands: a line on standard error, so that standard output is the result alone."""
    say(text, error=True)


def write_page(path: Path, html: str) -> None:
    """Write the page of stages' commands, and say where it is."""
    from tilewright.core.atomic_io import write_whole

    write_whole(path, html)
    say_aside(f"wrote {path}")
