"""Runs generated cases in processes of their own, so that a crash is one case's, and writes what came out."""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import write_result

LIMIT_S = 60
"""Seconds that one case may take, on a machine that others use too."""


def drive(module: str, claim: str, run_case: Callable[[int, Path], str]) -> None:
    """Command line of a benchmark that fuzzes. Its result is written from 10,000 cases on.

    Args:
        module: what `python -m` runs, whose main this is.
        claim: see `write_result`.
        run_case: seed and an empty folder -> outcome in a few words. Whatever it raises is a failure.
    """
    parser = argparse.ArgumentParser(description=claim)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        _run(run_case, given.first, given.run)
        return
    done: list[tuple[int, str, float]] = []
    at, end = given.first, given.first + given.cases
    while at < end:
        count = min(500, end - at)
        command = [sys.executable, "-m", module, "--first", str(at), "--run", str(count)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in found.stdout.splitlines()]
        done += lines
        at += len(lines)
        if "Traceback" in found.stderr:  # also one that Python only tells of, as of a callback
            done.append((at, f"failed: {found.stderr[-2000:]}", 0.0))
        if len(lines) < count:
            done.append((at, f"failed: crash, exit code {found.returncode}: {found.stderr[-500:]}", 0.0))
            at += 1
    failed = [case for case in done if case[1].startswith("failed")]
    for seed, outcome, _ in failed[:10]:
        print(f"--- case {seed}\n{outcome}")
    outcomes = Counter(outcome.split("\n")[0] for _, outcome, _ in done)
    result = {
        "unit": "cases",
        "cases": len(done),
        "first_seed": given.first,
        "failed": len(failed),
        "outcomes": dict(outcomes.most_common(10)),
        "slowest_s": round(max(seconds for *_, seconds in done), 2),
        "slowest_seed": max(done, key=lambda case: case[2])[0],
        "limit_s": LIMIT_S,
    }
    print(json.dumps(result, indent=1))
    if given.cases >= 10_000:
        write_result(module.rpartition(".")[2], claim, result)
    sys.exit(bool(failed))


def _alarm(*_: object) -> None:
    raise TimeoutError("a case took too long")


def _run(run_case: Callable[[int, Path], str], first: int, count: int) -> None:
    """Cases in this process, a line each on stdout."""
    signal.signal(signal.SIGALRM, _alarm)
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            signal.alarm(LIMIT_S)
            try:
                outcome = run_case(seed, Path(folder))
            except BaseException:  # noqa: BLE001  whatever it is, it is what is looked for
                outcome = "failed: " + traceback.format_exc()
            signal.alarm(0)
            print(json.dumps([seed, outcome, time.perf_counter() - began]), flush=True)
