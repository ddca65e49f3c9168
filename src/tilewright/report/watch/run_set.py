"""The runs that a page may ask for, by key: those that were named, and others of the same folders."""

import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tilewright.report.watch.watched_run import WatchedRun

MAX_OFFERED = 100
"""Newest runs of the folders that are offered."""
_SCAN_S = 3.0


class RunSet:
    """Run folders by the keys that the page uses.

    Args:
        folders: runs to show at first, at least one; each has a run.toml.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._lock = threading.Lock()
        self.session = secrets.token_hex(8)
        """Names this process to the page: keys of another one mean other runs."""
        self._runs: dict[Path, WatchedRun] = {}
        self.first = [self._add(folder.resolve()) for folder in dict.fromkeys(path.resolve() for path in folders)]
        self.parents = list(dict.fromkeys(run.folder.parent for run in self.first))
        self._scanned_s = -_SCAN_S
        self._known_at_start: set[Path] = set()
        self._scan()
        self._known_at_start = set(self._runs)

    def find(self, key: str) -> WatchedRun | None:
        """Find in the set of runs the one of a key that the page may ask for, None where there is none."""
        with self._lock:
            return next((run for run in self._runs.values() if run.key == key), None)

    def all(self) -> list[WatchedRun]:
        """List the watched runs: the named ones, then the others from the newest on. New folders are looked for every
        few seconds."""
        with self._lock:
            if time.monotonic() - self._scanned_s >= _SCAN_S:
                self._scan()
            changed = {run: _changed_s(run.folder) for run in self._runs.values() if run not in self.first}
            there = [run for run, seconds in changed.items() if seconds]
            return [*self.first, *sorted(there, key=lambda run: -changed[run])[:MAX_OFFERED]]

    def is_new(self, run: WatchedRun) -> bool:
        """True where the run of the set is new: it appeared after the start."""
        return run.folder not in self._known_at_start

    def name(self, run: WatchedRun) -> str:
        """The name of a watched run: its folder's, with the parent's if runs of several folders are watched."""
        return run.folder.name if len(self.parents) == 1 else f"{run.folder.parent.name}/{run.folder.name}"

    def _add(self, folder: Path) -> WatchedRun:
        if folder not in self._runs:
            self._runs[folder] = WatchedRun(folder, f"run{len(self._runs)}")
        return self._runs[folder]

    def _scan(self) -> None:
        for parent in self.parents:
            for folder in _folders(parent):
                if folder not in self._runs and not folder.is_symlink() and (folder / "run.toml").is_file():
                    self._add(folder)
        self._scanned_s = time.monotonic()


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir())
    except OSError:  # deleted
        return []


def _changed_s(folder: Path) -> float:
    """Start of a run in the set, 0 where it was deleted."""
    try:
        return (folder / "run.toml").stat().st_mtime
    except OSError:
        return 0.0
