"""Processor seconds of each test and of what it starts: `pytest --seconds FILE`, then `python -m tests.seconds FILE`.

Seconds by the clock say more of what else runs: two test processes beside ranks on two cores take two to four times as
long as they work.
"""

import json
import resource
import sys
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest


def spent() -> tuple[float, float, float]:
    """Processor seconds of this process, of its children that have ended, and of the fork server with its own."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    server = forkserver._forkserver._forkserver_pid
    of_server = sum(psutil.Process(server).cpu_times()[:4]) if server is not None else 0.0
    return time.process_time(), children.ru_utime + children.ru_stime, of_server


class SecondsPlugin:
    """Adds a line of JSON to a file for each test. Several test processes may write to one file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        before = spent()
        try:
            return (yield)
        finally:
            parts = [round(now - then, 3) for now, then in zip(spent(), before, strict=True)]
            line = json.dumps({"test": item.nodeid, "own": parts[0], "children": parts[1], "ranks": parts[2]})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def table(path: Path, number: int = 40) -> str:
    """The folders and files with most seconds, and the tests, one a line."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    sums: dict[str, Counter[str]] = {"folder": Counter(), "file": Counter(), "test": Counter()}
    for row in found:
        seconds, file = row["own"] + row["children"] + row["ranks"], row["test"].split("::")[0]
        for kind, name in {"folder": file.rpartition("/")[0], "file": file, "test": row["test"]}.items():
            sums[kind][name] += seconds
    total = {name: sum(row[name] for row in found) for name in ("own", "children", "ranks")}
    lines = [f"{len(found)} tests: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in total.items())]
    for kind, counted in sums.items():
        lines += ["", kind, *(f"{seconds:8.1f}  {name}" for name, seconds in counted.most_common(number))]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
