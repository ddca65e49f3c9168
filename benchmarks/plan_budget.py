"""The planner's choices beside other ways to fit a step into a budget of memory: same model, same rows, same budgets.

  planned     `memory.plan = "auto"` with `plan.device_budget`: keep, selective or recompute, layer by layer. A plan
              leaves `plan.margin` free and errs by some percent, so others are held to the peak that it then had
  torch       torch's `activation_memory_budget` (the partitioner of compiled layers), the fastest value that fits
  every_k     every k-th layer recomputed, the fastest k that fits (torchtitan's selective checkpointing by layers)
  full        every layer recomputed

All train the same decoder through the standard executor with compiled layers. Only steps are taken, so evaluation and
checkpoints are set such that they take no more memory than a step: a plan counts them. First each setting runs alone
in a process of its own, which gives the curve: whole-process peak and seconds of a step. Then, at each peak of a plan
the best setting of each way that stays within it takes steps in turns. A way of which nothing fits has no time.

python -m benchmarks.plan_budget [--rounds 3] [--budgets 5] [--tiny]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine_kind, spread, write_result
from tilewright.core.env import tune_cpu_runtime
from tilewright.core.placement import LayerPlacement, Placement

CLAIM = (
    "at equal peak the planned step is never slower than torch's memory budget, full checkpointing and every k-th "
    "layer, and faster at three budgets of five or more"
)
SHAPE = {
    "model.dim": "384", "model.num_layers": "8", "model.num_heads": "6", "model.num_kv_heads": "6",
    "model.ffn_dim": "1024", "data.vocab_size": "4096", "data.max_bytes": "8MB", "train.batch_size": "8",
    "train.micro_batch": "8", "train.eval_batches": "1", "run.device": "cpu", "plan.enforce": "false",
    "save.background": "false", "precision.eval_fp32": "false",
}  # fmt: skip
TINY = {"model.dim": "64", "model.num_layers": "4", "model.num_heads": "2", "model.num_kv_heads": "2"} | {
    "model.ffn_dim": "128", "data.vocab_size": "512", "data.max_bytes": "2MB", "data.seq_len": "64",
    "train.compile": "off",
}  # fmt: skip
TORCH_BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
EVERY = (2, 3, 4)
WARMUP, ALONE = 2, 2
OVER = (1.13, 1.05)
"""Budgets of planned runs go from this times the peak of `full` to this times that of `none`: for margin and error."""
TOLERANCE = 1.01
"""Peaks of the same setting differ by so much from process to process."""
WAYS = ("planned", "torch", "every_k", "full")


# ---- one setting in a process ----


def worker(setting: dict[str, Any], tiny: bool) -> None:
    """Warm up, then a step for each line on stdin; tell seconds and the largest resident set so far."""
    from torch._functorch import config as functorch

    from tilewright.core.load import load_recipe
    from tilewright.training.assemble import build, set_up

    if "torch_budget" in setting:
        functorch.activation_memory_budget = setting["torch_budget"]
    given = SHAPE | (TINY if tiny else {}) | setting.get("settings", {})
    parts = build(set_up(load_recipe("default", given, environ={})), fresh=True)
    if "every" in setting:
        number = int(given["model.num_layers"])
        recomputed = LayerPlacement(activations="recompute")
        layers = [recomputed if i % setting["every"] == 0 else LayerPlacement() for i in range(number)]
        parts.executor.place(Placement(layers=tuple(layers)))
    parts.executor.ledger = None  # its phases reset the system's mark of the largest resident set
    for count in range(10**9):
        if count >= WARMUP and not sys.stdin.readline():
            break
        start = time.perf_counter()
        parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(count))
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"step_s": seconds, "peak_bytes": peak}), flush=True)
    kept = [layer.activations for layer in parts.executor.placement.layers]
    print(json.dumps({"kept": kept}), flush=True)
    parts.close()


def start(setting: dict[str, Any], tiny: bool) -> subprocess.Popen:
    """A setting's process."""
    command = [sys.executable, "-m", "benchmarks.plan_budget", "--worker", json.dumps(setting)]
    # A compiler cache of its own: graphs made under another memory budget must not be met here.
    folder = Path(tempfile.gettempdir()) / f"plan_budget_{setting.get('torch_budget', 'none')}"
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        command + ["--tiny"] * tiny, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )


def answer(process: subprocess.Popen) -> dict[str, Any]:
    """The next line of numbers."""
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"a setting ended with code {process.wait()}")


def turns(settings: dict[str, dict[str, Any]], rounds: int, tiny: bool) -> dict[str, dict[str, Any]]:
    """Seconds and peaks of several settings, a step each in turn."""
    processes = {name: start(setting, tiny) for name, setting in settings.items()}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
    for process in processes.values():
        for _ in range(WARMUP):
            answer(process)
    for _ in range(rounds):
        for name, process in processes.items():
            process.stdin.write("go\n")
            process.stdin.flush()
            steps[name].append(answer(process))
    found = {}
    for name, process in processes.items():
        process.stdin.close()
        found[name] = {
            "step_s": spread([step["step_s"] for step in steps[name]]),
            "peak_bytes": steps[name][-1]["peak_bytes"],
            "kept": answer(process)["kept"],
        }
        process.wait()
    return found


# ---- curves and contests ----


def alone(name: str, setting: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """A point of a curve."""
    point = turns({name: setting}, ALONE, tiny)[name] | {"setting": setting}
    print(f"{name}: {point['peak_bytes'] / 2**20:.0f} MiB, {point['step_s']['median']:.2f} s", flush=True)
    return point


def planned(budget: float) -> dict[str, Any]:
    """The setting of a planned run."""
    return {"settings": {"memory.plan": "auto", "plan.device_budget": str(int(budget))}}


def unplanned(mode: str) -> dict[str, Any]:
    """The setting of a run with one mode for all layers."""
    return {"settings": {"memory.plan": "", "train.activation_checkpoint": mode}}


def contest(curves: dict[str, list[dict[str, Any]]], budget: float, args: argparse.Namespace) -> dict[str, Any]:
    """The best of each way within a budget, in turns."""
    best = {}
    for way, points in curves.items():
        fitting = [point for point in points if point["peak_bytes"] <= budget * TOLERANCE]
        if fitting:
            best[way] = min(fitting, key=lambda point: point["step_s"]["median"])["setting"]
    found: dict[str, Any] = {"budget_bytes": int(budget), **turns(best, args.rounds, args.tiny)}
    for way in WAYS[1:]:
        if way in found and "planned" in found:
            mine, theirs = (found[name]["step_s"]["samples"] for name in ("planned", way))
            found[f"{way} over planned"] = spread([b / a for a, b in zip(mine, theirs, strict=True)])
    print(json.dumps({name: row["step_s"]["median"] for name, row in found.items() if name in WAYS}), flush=True)
    return found


def main() -> None:
    """Curves, then a contest at each budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small size; its numbers mean nothing")
    parser.add_argument("--worker", type=json.loads)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker, args.tiny)
        return
    tune_cpu_runtime()
    none, full = (alone(mode, unplanned(mode), args.tiny) for mode in ("none", "full"))
    low, high = full["peak_bytes"], none["peak_bytes"]
    low, high = OVER[0] * low, OVER[1] * high
    budgets = [low + (high - low) * i / (args.budgets - 1) for i in range(args.budgets)]
    curves = {
        "planned": [alone(f"planned, {size / 2**20:.0f} MiB", planned(size), args.tiny) for size in budgets],
        "torch": [none]
        + [alone(f"torch, {share}", unplanned("none") | {"torch_budget": share}, args.tiny) for share in TORCH_BUDGETS],
        "every_k": [none, full] + [alone(f"every {k}", unplanned("none") | {"every": k}, args.tiny) for k in EVERY],
        "full": [full],
    }
    results: dict[str, Any] = {"unit": "seconds a step", "torch": torch.__version__, "curves": curves}
    peaks = sorted({point["peak_bytes"] for point in curves["planned"]})
    results["budgets"] = [contest(curves, peak, args) for peak in peaks]
    write_result(f"plan_budget_{'tiny' if args.tiny else machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
