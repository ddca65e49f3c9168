"""Contenders in processes of their own: each has its own peak of memory, and one that fails ends alone.

`call_worker` runs one to its end. A `TurnTaker` stays alive and does something whenever it is its turn, so that each
round of a `contest` compares all under the same conditions; its process calls `take_turns`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from benchmarks.common import Deadline
from tilewright.memory.tracking.malloc import trim_malloc

RETURNS_FREED = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20),
}  # fmt: skip
"""Environment in which what a process frees goes back to the system, so that its peak is what was needed."""
Turns = dict[str, list[dict[str, Any]]]
"""What each contender told, turn by turn."""


def call_worker(module: str, *arguments: str, timeout_s: float | None = None) -> dict[str, Any]:
    """Run `python -m benchmarks.<module> ...`, and return the JSON object that is the last line of its output.

    Args:
        timeout_s: it is ended after that, its children with it.

    Returns:
        The object, or {"error": exit code and the end of what it printed}. Never raises for what the worker does.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command_of(module, *arguments), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
            out, err = process.communicate()
            return {"error": f"ended after {timeout_s:.0f} s: {(err or out)[-2000:]}"}
    lines = out.splitlines()
    if process.returncode or not lines or not lines[-1].startswith("{"):
        return {"error": f"exit code {process.returncode}: {(err or out)[-2000:]}"}
    return json.loads(lines[-1])


def command_of(module: str, *arguments: str) -> list[str]:
    """The command of a program of this folder."""
    return [sys.executable, "-m", f"benchmarks.{module}", *arguments]


def out_of_memory(found: dict[str, Any]) -> bool:
    """Whether a worker ended for want of device memory."""
    return "out of memory" in found.get("error", "").lower()


# ---- in turns ----


class TurnTaker:
    """A contender's process, which answers each line with what it measured.

    Args:
        name: for people.
        module: of benchmarks, whose main calls `take_turns` with these arguments.
        arguments: of it.
        environ: of the process; None: this one's.
    """

    def __init__(self, name: str, module: str, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        self.name, pipe = name, subprocess.PIPE
        command = command_of(module, *arguments)
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ and dict(environ))

    def ask(self, line: str = "go") -> dict[str, Any]:
        """Its turn, with a line of one's own; what it answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """What it tells next; other lines, which libraries print, are passed over.

        Raises:
            SystemExit: it has ended.
        """
        for line in self.process.stdout or ():
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.name} ended with code {self.process.wait()}")

    def end(self) -> None:
        """No more turns."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def tell(found: dict[str, Any]) -> None:
    """An answer to the parent."""
    print(json.dumps(found), flush=True)


def take_turns(turn: Callable[[int], dict[str, Any]], warm_ups: int = 0) -> None:
    """In a contender's process: tell what `turn` returns for 0, 1, 2...: the warm-ups at once, then one a line."""
    count = 0
    while count < warm_ups or sys.stdin.readline():
        tell(turn(count))
        trim_malloc()  # while others have their turns: what all keep at once is more than a machine of 24 GiB has
        count += 1


def contest(
    takers: Mapping[str, TurnTaker],
    rounds: int,
    after: Callable[[Turns], None] = lambda turns: None,
    deadline: Deadline | None = None,
) -> Turns:
    """Rounds in which each contender has its turn; then all end.

    Args:
        takers: contenders by name, warmed up.
        rounds: at most.
        after: called after each round with all turns so far.
        deadline: no round is begun where the one before took more than is left of it.
    """
    turns: Turns = {name: [] for name in takers}
    taken_s = 0.0
    for done in range(rounds):
        if done and deadline is not None and deadline.left() < taken_s:
            break
        began = time.monotonic()
        for name, taker in takers.items():
            turns[name].append(taker.ask())
        after(turns)
        taken_s = time.monotonic() - began
    for taker in takers.values():
        taker.end()
    return turns
