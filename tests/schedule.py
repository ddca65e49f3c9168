"""Which test process gets which file: tests of ranks one after another in one of them, long tests first.

Ranks of a clone take turns (`tests.ranks.LOCK`). Where two test processes had such files, one of them waited for the
other with nothing to do, and each started a fork server, as tests do that start commands with one. Tests of runs and
commands are the longest, and some others are long: they come first, so that the processes end together.
"""

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[1]
RANKS = "ranks"
"""The part of the suite that is scheduled as one file."""
_IMPORTED = re.compile(r"^ *from (tests(?:\.\w+)*) import", re.M)
_START = {"tests.ranks", "tests.commands"}
"""Modules that start ranks or a fork server."""
FIRST = ("tests/training/", "tests/cli/", "tests/contracts/", "tests/planner/")
LONG = ("tests/ops/triton/", "tests/compress/", "tests/zoo/", "tests/serving/", "tests/gpu/", "tests/docs/")
"""Folders with files of few tests that take many seconds: not at the end, where the other process would wait."""


@cache
def part_of(file: str) -> str:
    """`RANKS` for a file of tests whose ranks take turns or that starts a fork server, else the file. A file that
    imports from one that does is taken for one too: most such files run its runs.

    Args:
        file: path from the root of the clone, as in ids of tests.
    """
    path = ROOT / file
    if path.suffix != ".py":
        return file
    imported = _IMPORTED.findall(path.read_text(encoding="utf-8"))
    return RANKS if any(name in _START or _part_of_module(name) == RANKS for name in imported) else file


def _part_of_module(name: str) -> str:
    file = f"{name.replace('.', '/')}.py"
    return part_of(file) if (ROOT / file).exists() else name


class RanksTogether(LoadFileScheduling):
    """xdist's schedule by files, in another order: ranks, files that train, other long ones, the rest."""

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid.split("::", 1)[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=turn_of), last=False)
        super()._assign_work_unit(node)


def turn_of(part: str) -> int:
    """Parts with a smaller number go first."""
    return 0 if part == RANKS else 1 if part.startswith(FIRST) else 2 if part.startswith(LONG) else 3
