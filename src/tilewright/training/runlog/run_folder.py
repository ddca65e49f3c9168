"""The folder of one run: where each file lies, one trainer at a time, and the `latest` link beside it.

    runs/NAME/  run.toml machine.json plan.json plan.toml data.json precision.json audit.json
                tokenizer.json
                metrics.jsonl events.jsonl samples.jsonl precision.jsonl checkpoints/ report.html

Who writes what into the files is the matter of `record_files`, `checkpoint` and `loop`.
"""

import fcntl
import os
from pathlib import Path
from typing import Any, TextIO

from tilewright.core.atomic_io import write_whole
from tilewright.core.errors import ConfigError
from tilewright.core.json_text import to_json


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
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 (held until close)
        except OSError as error:
            raise ConfigError(
                "Run folder cannot be written",
                got=str(error),
                need="a folder that this user may create files in",
                try_="--run.dir FOLDER",
                where=str(self.path),
            ) from error
        _lock_or_raise(self._lock, self.path)

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
            held, there = os.fstat(self._lock.fileno()), os.stat(self.path / ".lock")
            if (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino):
                return
            got = "another folder in its place"
        except FileNotFoundError:
            got = "no such folder any more" if not self.path.is_dir() else "the folder without its .lock"
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


def _lock_or_raise(file: TextIO, path: Path) -> None:
    """Lock a run's folder or raise: an advisory lock that the kernel drops when the process ends, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(
            "Another process is training in this run folder",
            got=f"process {owner} holds the lock",
            need="one trainer a run folder",
            try_="wait for it, or --run.name NEW",
            where=str(path),
        ) from error
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
