"""What became of a run: waiting for data, running, finished, stopped early, killed, or deleted.

Finished and stopped are events of the run. Without one the run is running while the process lives that the lock file of
the folder names. A process of another container cannot be seen, so a file written a moment ago counts too.
"""

import time
from pathlib import Path

import psutil

FRESH_S = 30.0
"""A run whose metrics were written within this time is running, whatever the lock file says."""
_SLACK_S = 2.0
_LARGEST_PID = 2**31 - 1
_ENDINGS = {"done": "finished", "stop": "stopped early"}


def run_status(folder: Path, last_kind: str, has_data: bool) -> str:
    """The state of a run in words.

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
    """Whether the process that wrote its number into the lock file is alive, not a later one of that number."""
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
