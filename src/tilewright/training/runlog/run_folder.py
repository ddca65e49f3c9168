"""The folder of one run: where each file lies, one trainer at a time, and the `latest` link beside it.

    runs/NAME/  run.toml machine.json plan.json plan.toml data.json precision.json audit.json
                tokenizer.json
                metrics.jsonl events.jsonl samples.jsonl precision.jsonl checkpoints/ report.html

Who writes what into the files is the matter of `record_files`, `checkpoint` and `loop`.
"""

import fcntl
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from tilewright.core.atomic_io import write_whole
from tilewright.core.errors import ConfigError, Problem
from tilewright.core.json_text import to_json

LOCK = ".lock"
"""In a folder, with the number of the process that had it last."""


class RunFolder:
    """A run's folder, locked against a second trainer while this object is open.

    Of the ranks of a run the first one has it; the others have one that `follows`, which writes nothing and locks
    nothing.

    Args:
        path: made where it is missing.
        follows: another process writes it.

    Raises:
        ConfigError: the folder cannot be made or written, or another process trains in it.
    """

    def __init__(self, path: Path, *, follows: bool = False) -> None:
        self.path = Path(path).absolute()
        self.checkpoints = self.path / "checkpoints"
        self.recipe = self.path / "run.toml"
        self._lock: TextIO | None = None
        if follows:
            return
        self._lock = lock_folder(
            self.path,
            busy=Problem(
                "Another process is training in this run folder",
                need="one trainer per run folder",
                try_="wait for it, or --run.name NEW",
            ),
            refused=Problem(
                "Run folder cannot be written",
                need="a folder that this user may create files in",
                try_="--run.dir FOLDER",
            ),
        )

    def close(self) -> None:
        """Free the lock of the run's folder."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Check that the run's folder is still the one that was opened.

        Raises:
            ConfigError: it was deleted, moved or replaced.
        """
        if self._lock is None:
            return
        try:
            held, there = os.fstat(self._lock.fileno()), os.stat(self.path / LOCK)
            if (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino):
                return
            got = "another folder in its place"
        except FileNotFoundError:
            got = "no such folder any more" if not self.path.is_dir() else f"the folder without its {LOCK}"
        raise ConfigError(
            "Run folder was deleted or moved while the run was under way",
            got=got,
            need="the folder for as long as the run takes",
            try_="move it back and run the same command: it continues from the newest checkpoint",
            where=str(self.path),
        )

    def has_run(self) -> bool:
        """True where a run has written into this folder before."""
        return self.recipe.exists() or self.checkpoints.exists()

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file of the run's folder, whole or not at all; numbers that are not finite are null."""
        if self._lock is None:
            return
        try:
            write_whole(self.path / name, to_json(value, indent=1, default=str) + "\n")
        except OSError as error:
            self.check()
            raise cannot_write(self.path / name, error) from error

    def link_latest(self) -> None:
        """Point `latest`, beside the run's folder, at it."""
        if self._lock is None:
            return
        link = self.path.parent / "latest"
        fresh = self.path.parent / f".latest.{os.getpid()}"
        if link.exists() and not link.is_symlink():
            return  # the user has a run of that name
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.path.name)
        os.replace(fresh, link)


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """The error of a file of a run's folder that cannot be written."""
    return ConfigError(
        "File of the run folder cannot be written",
        got=str(error),
        need="room on the disk, and the right to write in the folder",
        try_="free disk space and run the same command: it continues from the newest checkpoint",
        where=str(path),
    )


def move_away(path: Path) -> Path | None:
    """Rename an existing run folder to the first free `NAME.old-1`, `NAME.old-2`...; its new path, None if none was."""
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(target)
    return target


def lock_folder(folder: Path, *, busy: Problem, refused: Problem) -> TextIO:
    """Lock a folder against other processes; returns the file that holds the lock until it is closed, or the process
    ends, however it ends.

    Args:
        folder: made where it is missing.
        busy: of the error where another process has the lock; its "got" names the process, "where" the folder.
        refused: of the error where the folder or the lock cannot be made; its "got" is what the system says.

    Raises:
        ConfigError: one of both.

    Example:
        >>> import tempfile
        >>> other, full = Problem("Folder is in use"), Problem("Folder cannot be written")
        >>> with tempfile.TemporaryDirectory() as name, lock_folder(Path(name), busy=other, refused=full):
        ...     lock_folder(Path(name), busy=other, refused=full)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        tilewright.core.errors.ConfigError: Folder is in use
          where  ...
          got    process ... holds the lock
    """
    owner = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (held until close)
        try:
            _take(file)
        except OSError:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            raise
    except BlockingIOError as error:
        problem = replace(busy, got=f"process {owner or 'unknown'} holds the lock", where=str(folder))
        raise ConfigError.from_problems([problem]) from error
    except OSError as error:
        raise ConfigError.from_problems([replace(refused, got=str(error), where=str(folder))]) from error
    return file


def _take(file: TextIO) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
