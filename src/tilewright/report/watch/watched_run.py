"""One run folder that is being watched: its metrics, newest events and samples, and its settings, read as they grow."""

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil

from tilewright.core.units import format_seconds
from tilewright.report.run_data.clean_rows import Row, clean, number
from tilewright.report.run_data.collect_run import RecordedSetting, recorded_settings
from tilewright.report.watch.curves import Metrics
from tilewright.report.watch.tail_jsonl import JsonTail, NewRows

FRESH_S = 30.0
"""A run whose metrics were written within this time is running, whatever the lock file says."""
_SLACK_S = 2.0
_LARGEST_PID = 2**31 - 1
_ENDINGS = {"done": "finished", "stop": "stopped early"}


def run_status(folder: Path, last_kind: str, has_data: bool) -> str:
    """The state of a watched run in words.

    Args:
        folder: of the run.
        last_kind: kind of its newest event that tells of the process (start, resume, stop, done); empty without one.
        has_data: there is a row of metrics.
    """
    if not (folder / "run.toml").exists():
        return "deleted"
    if last_kind in _ENDINGS:
        return _ENDINGS[last_kind]
    if not (process_lives(folder / ".lock") or _age_s(folder / "metrics.jsonl") < FRESH_S):
        return "killed" if has_data or last_kind else "no data yet"
    return "running" if has_data else "no data yet"


def process_lives(lock: Path) -> bool:
    """True where the process of a watched run lives, which wrote its number into the lock file, not a later one of that
    number."""
    try:
        number = int(lock.read_text(encoding="utf-8").strip())
        if not 0 < number <= _LARGEST_PID:
            return False
        written_s = lock.stat().st_mtime
        process = psutil.Process(number)
        return process.create_time() <= written_s + _SLACK_S and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.Error):
        return False


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


NUM_EVENTS, NUM_SAMPLES = 60, 5
"""Newest events and samples that are kept."""
MAX_TEXT = 4000
"""Characters of a sample or message that are shown."""
_MIN_AGE_S = 0.2
"""Two pages that ask within this time share one look at the files."""
_PROCESS_EVENTS = frozenset({"start", "resume", "stop", "done"})


class WatchedRun:
    """A run folder and what has been read of it. Methods may be called by several threads.

    Args:
        folder: with a run.toml; it may be deleted later, and what was read stays.
        key: names the run to the page.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        self.lock = threading.RLock()
        self.version = 0
        """Rises with every change of what was read."""
        self.status = "no data yet"
        self.metrics = Metrics()
        self.events: deque[Row] = deque(maxlen=NUM_EVENTS)
        self.samples: deque[Row] = deque(maxlen=NUM_SAMPLES)
        self.settings: list[RecordedSetting] = []
        self._tails = {name: JsonTail(folder / f"{name}.jsonl") for name in ("metrics", "events", "samples")}
        self._bad = dict.fromkeys(self._tails, 0)
        self._unreadable: dict[str, str] = {}
        self._restarts = 0
        self._last_kind = ""
        self._recipe_changed = -1
        self._looked_s = -_MIN_AGE_S

    @property
    def trouble(self) -> list[str]:
        """Files of the watched run that could not be read, in words."""
        lines = [f"{name}.jsonl: {count} unreadable lines left out" for name, count in self._bad.items() if count]
        lines += [f"{name} cannot be read: {why}" for name, why in self._unreadable.items()]
        if self._restarts:
            lines.append(f"Files were replaced by a restart ({self._restarts} x) and read again")
        return lines

    def refresh(self) -> None:
        """Read what is new in the watched run's folder."""
        with self.lock:
            if time.monotonic() - self._looked_s < _MIN_AGE_S:
                return
            if (self.folder / "run.toml").exists():  # else what was read stays
                self._read_recipe()
                self._read_metrics(self._new("metrics"))
                self._read_events(self._new("events"))
                self._read_samples(self._new("samples"))
            self.status = run_status(self.folder, self._last_kind, self.last_step is not None)
            self._looked_s = time.monotonic()

    @property
    def last_step(self) -> int | None:
        """Newest training step of the watched run."""
        return self.metrics.training.last_step

    def setting(self, name: str) -> str | None:
        """A setting of the watched run as it is written in run.toml."""
        return next((setting.value for setting in self.settings if setting.name == name), None)

    def _new(self, name: str) -> NewRows:
        try:
            found = self._tails[name].read()
        except OSError as error:
            self._unreadable[f"{name}.jsonl"] = error.strerror or str(error)
            return NewRows()
        self._unreadable.pop(f"{name}.jsonl", None)
        if found.restarted:
            self._restarts += name == "metrics"
            self._bad[name] = 0
        self._bad[name] += found.bad
        self.version += bool(found.rows or found.restarted or found.bad)
        return found

    def _read_metrics(self, found: NewRows) -> None:
        if found.restarted:
            self.metrics = Metrics()
        for row in found.rows:
            self.metrics.add(row)

    def _read_events(self, found: NewRows) -> None:
        if found.restarted:
            self.events.clear()
            self._last_kind = ""
        for row in found.rows:
            kind = str(row.get("kind", ""))
            if kind in _PROCESS_EVENTS:
                self._last_kind = kind
            self.events.append(_shown(row, ("kind", "message")))

    def _read_samples(self, found: NewRows) -> None:
        if found.restarted:
            self.samples.clear()
        self.samples.extend(_shown(row, ("prompt", "text")) for row in found.rows[-NUM_SAMPLES:])

    def _read_recipe(self) -> None:
        path = self.folder / "run.toml"
        try:
            changed = path.stat().st_mtime_ns
            if changed == self._recipe_changed:
                return
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            self._unreadable["run.toml"] = error.strerror or str(error)
            return
        self._unreadable.pop("run.toml", None)
        self._recipe_changed = changed
        self.settings = recorded_settings(text)
        self.version += 1


def _shown(row: Row, texts: tuple[str, ...]) -> dict[str, Any]:
    """Step, time and texts of a watched run's row, of a length that a page can show."""
    row = clean(row)
    seconds = number(row.get("time_s"))
    found: dict[str, Any] = {name: str(row.get(name, ""))[:MAX_TEXT] for name in texts}
    return found | {"step": number(row.get("step")), "time": "" if seconds is None else format_seconds(seconds)}
