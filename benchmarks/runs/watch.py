"""What `tilewright watch` costs: seconds to the first view, memory, and processor time while nothing happens.

Four runs of 10,000 steps in files as training writes them (its own `RunLog`; the numbers are made up). Each repetition
starts the command again, so the first view reads all the files. In a browser, where there is one: the time from asking
for the page to drawn curves.

python -m benchmarks.runs.watch
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import spread, write_result
from tilewright.core.config.load import load_recipe, write_run_toml
from tilewright.training.executor.base import StepResult
from tilewright.training.runlog.record_files import Counters, RunLog
from tools.browser import browser, why_not

CLAIM = "4 runs of 10,000 steps: first view under 1 s, under 100 MB resident, under 1 % of a core while idle"
RUNS, STEPS, LOG_INTERVAL, EVAL_INTERVAL = 4, 10_000, 10, 250
DOMAINS, OWNERS = ("code", "cpp", "docs", "notes", "tests"), ("parameters", "optimizer", "gradients", "activations")
PARTS = ("watch.css", "watch.js", "chart.js", "panels.js", "format.js")
IDLE_S = 30.0


def write_run(folder: Path, seed: int) -> None:
    """A run folder with the files that the page reads."""
    folder.mkdir()
    write_run_toml(load_recipe("default", [f"--optim.lr={seed * 1e-3}"], environ={}), folder / "run.toml")
    draw, log, counters = random.Random(seed), RunLog(folder), Counters()
    log.event(0, "start", "synthetic")
    for step in range(1, STEPS + 1):
        loss = 2.5 + seed / 10 + 6 * math.exp(-step / 800) + draw.gauss(0, 0.06)
        result = StepResult(loss, 4096, 4096, math.exp(draw.gauss(0, 0.3)), None, 1.0, 0.5)
        counters.add(result)
        log.step(counters, result, 1e-3, 0.001, snapshot(draw) if step % LOG_INTERVAL == 0 else None)
        if step % EVAL_INTERVAL == 0:
            held_out = {"loss": loss + 0.1, "ppl": math.exp(loss), "tokens": 4096}
            log.metrics(step, eval=dict.fromkeys(DOMAINS, held_out))
            log.event(step, "eval", f"held-out loss {loss:.3f}", seconds=1.0)
    log.event(STEPS, "done", f"{STEPS} steps")
    log.close()


def snapshot(draw: random.Random) -> dict[str, Any]:
    """What a memory tracker says at a progress line."""
    owners = {name: draw.randrange(2**28, 2**29) for name in OWNERS}
    return {
        "peak_bytes": sum(owners.values()),
        "owners": owners,
        "phase_owners": {phase: owners for phase in ("forward", "backward", "optimizer")},
        "tiers": {},
    }


class Watched:
    """The command as a process."""

    def __init__(self, folder: Path) -> None:
        names = [f"run{number}" for number in range(RUNS)]
        began = time.perf_counter()
        self._child = subprocess.Popen(
            [sys.executable, "-u", "-m", "tilewright", "watch", *names, "--port", "0"],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        self.url = self._child.stdout.readline().strip()
        self.start_s = time.perf_counter() - began
        self.process = psutil.Process(self._child.pid)

    def processor_s(self) -> float:
        """Processor time so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        """End it as a service manager does (a shell's background jobs get no Ctrl-C), whatever went wrong before."""
        self._child.terminate()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def first_view(folder: Path) -> dict[str, float]:
    """One repetition over HTTP: the page's parts one after another, then the curves."""
    with Watched(folder) as watched:
        before, began = watched.processor_s(), time.perf_counter()
        size = 0
        for path in ("", *(f"pages/{name}" for name in PARTS), "api/view"):
            with urllib.request.urlopen(watched.url + path) as answer:
                body = answer.read()
                size += len(body)
        seconds, processor_s = time.perf_counter() - began, watched.processor_s() - before
        runs = json.loads(body)["runs"]
        if [run["step"] for run in runs] != [STEPS] * RUNS:
            raise SystemExit(f"not all steps were read: {[run['step'] for run in runs]}")
        resident = watched.process.memory_info().rss
    found = {"start_s": watched.start_s, "first_view_s": seconds, "first_view_processor_s": processor_s}
    return found | {"first_view_bytes": size, "resident_bytes": resident}


def in_browser(folder: Path) -> float:
    """Seconds from asking for the page to drawn curves."""
    with Watched(folder) as watched, browser() as page:
        page.size(1200, 960)
        page.open(watched.url)
        page.wait("performance.getEntriesByName('shown').length > 0", 60)
        lines = page.run("document.querySelectorAll('figure[data-metric=loss] path.line').length")
        if lines != RUNS:
            raise SystemExit(f"{lines} curves are drawn")
        milliseconds = page.run("performance.getEntriesByName('shown')[0].startTime")
    return milliseconds / 1000


def idle(folder: Path) -> dict[str, float]:
    """Share of a core while a page asks once per second and nothing is new; and with no page."""
    with Watched(folder) as watched:
        with urllib.request.urlopen(watched.url + "api/view") as answer:
            known = ",".join(f"{run['key']}:{run['version']}" for run in json.load(answer)["runs"])
        shares = {}
        for name, asks in (("idle_percent_with_a_page", True), ("idle_percent_without_a_page", False)):
            before, began = watched.processor_s(), time.perf_counter()
            stopped = threading.Event()
            while not stopped.wait(1.0) and time.perf_counter() - began < IDLE_S:
                if asks:
                    urllib.request.urlopen(f"{watched.url}api/view?known={known}").read()
            shares[name] = 100 * (watched.processor_s() - before) / (time.perf_counter() - began)
        shares["resident_bytes_after"] = watched.process.memory_info().rss
    return shares


def main() -> None:
    """Write the runs, measure, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        folder.mkdir()
        for number in range(RUNS):
            write_run(folder / f"run{number}", number + 1)
        sizes = sum(path.stat().st_size for path in folder.glob("*/*.jsonl"))
        rows = [first_view(folder.parent) for _ in range(repeat)]
        results: dict[str, Any] = {key: spread([row[key] for row in rows]) for key in rows[0]}
        if reason := why_not():
            print(f"not measured in a browser: {reason}")
        else:
            results["browser_first_view_s"] = spread([in_browser(folder.parent) for _ in range(repeat)])
        results |= idle(folder.parent)
    results |= {"runs": RUNS, "steps": STEPS, "files_bytes": sizes, "load_average": os.getloadavg()[0]}
    print(json.dumps(results, indent=1))
    write_result("watch", CLAIM, results)


if __name__ == "__main__":
    main()
