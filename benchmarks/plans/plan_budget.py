"""The planner's choices beside other ways to fit a step into a budget of memory: same model, same rows, same budgets.

  planned     `memory.plan = "auto"` with `plan.device_memory`: what is kept, layer by layer, re-planned after the
              first steps, as `tilewright train` does. A plan leaves `plan.margin` free, so others are held to the peak
              that it then had
  torch       torch's `activation_memory_budget` (the partitioner of compiled layers), the fastest value that fits
  every_k     every k-th layer recomputed, the fastest k that fits (torchtitan's selective checkpointing by layers)
  full        every layer recomputed

All train the same FP32 decoder through the standard executor with compiled layers: in FP32 every matmul is torch's
own, and its partitioner knows what it costs. Where a CPU multiplies BF16 in FP32 the matmul is an operation of ours,
which the partitioner holds to be free. The micro-batch is given, so the planner does not make it smaller.
The C library keeps freed pages in all of them (`HELD`), so that steps are compared and not how often pages are fetched.
Each setting's graphs are compiled in a process before: what compiling takes is in nobody's peak then.
The run is a long one, in which a change of plan pays. Only steps of it are taken, so evaluation and checkpoints are set
such that they take no more memory than a step: a plan counts them. Each setting is a process of its own that waits for
its turn; all take steps in turns, so a busy moment of the machine hits all alike. At each peak of a plan the two best
settings of each way that stay within it are chosen. Then each is measured once more beside the plan, step by step,
first one first and then the other, until it is clear which is faster: the best of several is partly the luckiest, so
the turns in which they were chosen don't count. Of the two the one that does better then is the way's. A way of which
nothing fits has no time. All processes stay until the end: 14 GiB or so.

OMP_NUM_THREADS=1 python -m benchmarks.plans.plan_budget [--rounds 6] [--pairs 32] [--budgets 5] [--tiny]
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.common import RESULTS, machine_kind, spread, watched_step, write_result
from benchmarks.worker import TurnTaker, command_of, take_turns, tell
from tilewright.core.env import tune_cpu_runtime
from tilewright.core.memory_plan import LayerMemory, MemoryPlan

CLAIM = (
    "at equal peak the planned step is never slower than torch's memory budget, full checkpointing and every k-th "
    "layer, and faster at three budgets of five or more"
)
MARGIN = 0.05
SHAPE = {
    "model.dim": "384", "model.num_layers": "8", "model.num_heads": "6", "model.num_kv_heads": "6",
    "model.ffn_dim": "1024", "data.vocab_size": "4096", "data.max_bytes": "8MB", "train.global_batch_size": "4",
    "train.micro_batch_size": "4", "train.eval_batches": "1", "run.device": "cpu", "plan.enforce": "false",
    "train.steps": "10000", "plan.margin": str(MARGIN), "precision.mode": "fp32", "checkpoint.async_save": "false",
    "precision.eval_fp32": "false",
}  # fmt: skip
TINY = {"model.dim": "64", "model.num_layers": "4", "model.num_heads": "2", "model.num_kv_heads": "2"} | {
    "model.ffn_dim": "128", "data.vocab_size": "512", "data.max_bytes": "2MB", "data.seq_len": "512",
    "train.global_batch_size": "16", "train.micro_batch_size": "16", "train.compile": "off",
}  # fmt: skip
TORCH_BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
EVERY = (2, 3, 4)
WARMUP = 4
"""Steps. A plan is settled by what its first two measured."""
HELD = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""glibc maps blocks above the first, at most 32 MiB, and returns what is free at the end above the second."""
TOLERANCE = 1.01
"""Peaks of the same setting differ by so much from process to process."""
FEWEST_PAIRS = 8
CLEAR = 4.0
"""Standard errors that the mean ratio of a duel must be from 1 for it to end early."""
FINALISTS = 2
"""Settings of a way that are measured beside a plan."""
WAYS = ("planned", "torch", "every_k", "full")
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "plan_budget.svg"


# ---- one setting in a process ----


def worker(setting: dict[str, Any], tiny: bool) -> None:
    """Warm up, then a step for each line on stdin; tell seconds and the largest resident set so far."""
    from torch._functorch import config as functorch

    from tilewright.core.config.load import load_recipe
    from tilewright.training.assemble import build, set_up
    from tilewright.training.hooks.replan_setup import replanner_for

    if "torch_budget" in setting:
        functorch.activation_memory_budget = setting["torch_budget"]
    given = SHAPE | (TINY if tiny else {}) | setting.get("settings", {})
    ready = set_up(load_recipe("cpu_10m", given, environ={}))
    parts = build(ready, fresh=True)
    if "every" in setting:
        number = int(given["model.num_layers"])
        recomputed = LayerMemory(activations="recompute")
        layers = [recomputed if i % setting["every"] == 0 else LayerMemory() for i in range(number)]
        parts.executor.apply_memory_plan(MemoryPlan(layers=tuple(layers)))
    replanner = replanner_for(ready, parts, Telling()) if given["memory.plan"] else None
    if replanner is None:
        parts.executor.memory_tracker = None  # its phases reset the system's mark of the largest resident set
    tell({"predicted_bytes": ready.plan.peak_bytes})
    peak = 0

    def turn(count: int) -> dict[str, Any]:
        nonlocal peak
        start, busy = time.perf_counter(), time.process_time()
        batches, rate = parts.stream.next_step(), parts.schedule.lr_at(count)
        if replanner is None:
            parts.executor.step(batches, rate)
        else:
            watched_step(replanner, count + 1, batches, rate)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        peak = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if replanner is not None:
            phases = parts.memory_tracker.snapshot(parts.model, parts.optimizer)["phases"]
            peak = max(peak, *(size for name, size in phases.items() if name != "load"))
        kept = [layer.activations for layer in parts.executor.memory_plan.layers]
        return {"step_s": seconds, "cpu_s": busy, "peak_bytes": peak, "kept": kept}

    take_turns(turn, WARMUP)
    parts.close()


class Telling:
    """Takes the events of a run: to stderr, for people."""

    def event(self, step: int, kind: str, text: str, **numbers: object) -> None:
        """As `Recorder.event`."""
        print(f"step {step}: {text}", file=sys.stderr, flush=True)


class Setting(TurnTaker):
    """A setting's process, warmed up.

    Args:
        way: one of `WAYS`, or "none".
        label: for people.
        setting: what the worker is reported.
        tiny: take the small size.
    """

    def __init__(self, way: str, label: str, setting: dict[str, Any], tiny: bool) -> None:
        self.way, self.label, self.setting = way, label, setting
        arguments = ["plans.plan_budget", "--worker", json.dumps(setting), *["--tiny"] * tiny]
        # A compiler cache of its own: graphs made under another memory budget must not be met here.
        words = re.findall(r"[\w.]+", f"plan_budget {label} {'tiny' * tiny}")  # g++ is not told of spaces in paths
        folder = Path(tempfile.gettempdir()) / "_".join(words)
        env = os.environ | HELD | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
        if not folder.exists():
            none = subprocess.DEVNULL
            subprocess.run(command_of(*arguments), stdin=none, stdout=none, env=env, check=True)
        super().__init__(label, *arguments, environ=env)
        self.about = self.answer()
        self.steps: list[dict[str, Any]] = []
        for _ in range(WARMUP):
            self.last = self.answer()
        print(f"{label}: {self.peak_bytes / 2**20:.0f} MiB, {self.last['step_s']:.2f} s", flush=True)

    @property
    def peak_bytes(self) -> float:
        """Largest resident set so far."""
        return self.last["peak_bytes"]

    @property
    def median_s(self) -> float:
        """Of a step."""
        return spread([step["step_s"] for step in self.steps])["median"]

    def step(self, *, counted: bool = True) -> None:
        """One more step. `counted`: among those of the turns."""
        self.last = self.ask()
        self.steps += [self.last] if counted else []

    def point(self) -> dict[str, Any]:
        """For the result."""
        times = {name: spread([step[name] for step in self.steps]) for name in ("step_s", "cpu_s")}
        about = self.about | {"kept": self.last["kept"], "peak_bytes": self.peak_bytes}
        return {"way": self.way, "label": self.label, **about, **times}


# ---- what is compared ----


def unplanned(mode: str) -> dict[str, Any]:
    """The setting of a run with one mode for all layers."""
    return {"settings": {"memory.plan": "", "train.activation_checkpoint": mode}}


def all_settings(num_budgets: int, tiny: bool) -> list[Setting]:
    """Every setting of every way, warmed up."""
    none, full = (Setting(way, mode, unplanned(mode), tiny) for way, mode in (("none", "none"), ("full", "full")))
    found = [none, full]
    low, high = full.about["predicted_bytes"], none.about["predicted_bytes"]
    for i in range(num_budgets):
        budget = int((low + (high - low) * (i + 1) / (num_budgets + 1)) / (1 - MARGIN))
        settings = {"memory.plan": "auto", "plan.device_memory": str(budget)}
        found.append(Setting("planned", f"planned, {budget >> 20} MiB", {"settings": settings}, tiny))
    for share in TORCH_BUDGETS:
        found.append(Setting("torch", f"torch, {share}", unplanned("none") | {"torch_budget": share}, tiny))
    for k in EVERY:
        found.append(Setting("every_k", f"every {k}", unplanned("none") | {"every": k}, tiny))
    return found


def contest(mine: Setting, settings: list[Setting], num_pairs: int) -> dict[str, Any]:
    """A plan against the best of each way within the plan's peak. Keeping everything is an end of each way."""
    found: dict[str, Any] = {"peak_bytes": mine.peak_bytes, "planned": mine.label}
    ratios: dict[str, Any] = {}
    for way in WAYS[1:]:
        mode = (way,) if way == "full" else (way, "none")
        fitting = [s for s in settings if s.way in mode and s.peak_bytes <= mine.peak_bytes * TOLERANCE]
        if way == "every_k":
            fitting += [s for s in settings if s.way == "full" and s.peak_bytes <= mine.peak_bytes * TOLERANCE]
        if fitting:
            chosen = sorted(fitting, key=lambda setting: setting.median_s)[:FINALISTS]
            for one in chosen:
                if one.label not in ratios:
                    ratios[one.label] = spread(duel(mine, one, num_pairs))
            best = min(chosen, key=lambda setting: ratios[setting.label]["median"])
            found[way] = {"best": best.label, "peak_bytes": best.peak_bytes, "over planned": ratios[best.label]}
    return found


def duel(mine: Setting, other: Setting, most_pairs: int) -> list[float]:
    """The other's seconds over mine, in pairs of steps of which every second one is taken the other way round: until it
    is clear which is faster, or `most_pairs`."""
    ratios: list[float] = []
    for number in range(most_pairs):
        for one in (mine, other) if number % 2 == 0 else (other, mine):
            one.step(counted=False)
        ratios.append(other.last["step_s"] / mine.last["step_s"])
        if len(ratios) >= FEWEST_PAIRS and abs(mean(ratios) - 1) > CLEAR * stdev(ratios) / len(ratios) ** 0.5:
            break
    return ratios


def draw(contests: list[dict[str, Any]], path: Path) -> None:
    """Seconds of each way's best over those of the plan, at the plan's peaks; medians of pairs."""
    from tilewright.report.svg.charts import Series, line_chart, standalone

    names = {
        "planned": "planned, layer by layer",
        "torch": "torch's activation_memory_budget",
        "every_k": "every k-th layer recomputed",
        "full": "every layer recomputed",
    }
    series = []
    for colour, (way, name) in enumerate(names.items()):
        there = [found for found in contests if way == "planned" or way in found]
        ratios = [1.0 if way == "planned" else found[way]["over planned"]["median"] for found in there]
        series.append(Series(name, [found["peak_bytes"] / 2**20 for found in there], ratios, colour, "line"))
    size, title = (760, 420), "Seconds of a step over those of the plan, at the peak that it has"
    x_label = "peak of the plan's process, MiB"
    chart = line_chart(series, label=title, y_label="seconds over the plan's", x_label=x_label, size=size)
    path.write_text(standalone(chart, title, list(names.values()), size), encoding="utf-8")


def main() -> None:
    """All settings in turns, then what is compared at each plan's peak."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=32, help="at most, where it is not clear before")
    parser.add_argument("--budgets", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small size; its numbers mean nothing")
    parser.add_argument("--worker", type=json.loads)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker, args.tiny)
        return
    tune_cpu_runtime()
    settings = all_settings(args.budgets, args.tiny)
    for _ in range(args.rounds):
        for setting in settings:
            setting.step()
    points = [setting.point() for setting in settings]
    contests = []
    for setting in settings:
        if setting.way == "planned":
            contests.append(contest(setting, settings, args.pairs))
            print(json.dumps(contests[-1]), flush=True)
    for setting in settings:
        setting.end()
    results = {"unit": "seconds per step", "torch": torch.__version__, "curves": points, "budgets": contests}
    folder = write_result(f"plan_budget_{'tiny' if args.tiny else machine_kind()}", CLAIM, results).parent
    draw(contests, PICTURE if folder == RESULTS and not args.tiny else folder / "plan_budget.svg")


if __name__ == "__main__":
    main()
