"""The common parts of `compress` and `search`: the folder of their stages beside a run, lines while they work, their
page."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Lock the folder of stages: inside, no other `compress` or `search` works there; what one finds is its own.

    Args:
        out: made where it is missing.

    Raises:
        ConfigError: one does, or the folder cannot be written.
    """
    from tilewright.core.errors import Problem
    from tilewright.training.runlog.run_folder import lock_folder

    busy = Problem(
        "Another process works in this folder of stages",
        need="one compress or search per folder",
        try_=f"wait for it, then the same command, which continues; or --out {out}-2",
    )
    refused = Problem(
        "Folder of stages cannot be written",
        need="a folder that this user may create files in",
        try_="--out FOLDER",
    )
    with lock_folder(out, busy=busy, refused=refused):
        yield


def say_aside(text: str) -> None:
    """Say aside, in stages' commands: a line on standard error, so that standard output is the result alone."""
    say(text, error=True)


def write_page(path: Path, html: str) -> None:
    """Write the page of stages' commands, and say where it is.

    Raises:
        CheckpointError: it cannot be written.
    """
    from tilewright.core.atomic_io import write_whole
    from tilewright.core.errors import CheckpointError

    try:
        write_whole(path, html)
    except OSError as error:
        raise CheckpointError(
            "Page cannot be written",
            got=str(error),
            need="room on the disk, and the right to write in the folder",
            try_="free space and run the same command: finished stages are whole",
            where=str(path),
        ) from error
    say_aside(f"wrote {path}")


@contextmanager
def page_behind(write: Callable[[], None]) -> Iterator[None]:
    """Write the page of stages behind what is inside, whether that failed or not. Where both fail the first error is
    raised, for it says what to do, and of the page a line is said.

    Args:
        write: the page; it raises a CheckpointError.

    Raises:
        CheckpointError: the page alone could not be written.
    """
    from tilewright.core.errors import CheckpointError

    failed = True
    try:
        yield
        failed = False
    finally:
        try:
            write()
        except CheckpointError as error:
            if not failed:
                raise
            say_aside(f"no page: {error.problems[0].got}")
