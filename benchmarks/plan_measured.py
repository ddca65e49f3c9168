"""Planned beside measured: three models under four plans each, before the first step and after it.

Models: the default decoder, recipe tiny_moe (mixture of experts, latent attention), a foreign Llama. Plans:

  as it stands   the recipe fits, and nothing is decided
  budget         `plan.device_budget` at 85 % of what the recipe would take: `memory.plan = "auto"` decides
  recomputed     `train.activation_checkpoint = "full"`
  layer_major    the layer-major executor, 8-bit moments on disk

Each runs in a process of its own, regrouping as `tilewright train` does: a few steps, an evaluation, and a checkpoint
with a step beside it. `before` is what the plan said of the whole run, against its highest whole-process peak;
`before_steps` the same of the steps alone; `after` what the run expected of a step once the first one had been
measured; step time is the median after the first. The machine's ceilings are measured anew for each case. A first
pass, not counted, prepares data and kernels.

python -m benchmarks.plan_measured [--steps 6] [--only MODEL ...]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine_kind, write_result
from benchmarks.plan_accuracy import LLAMA
from tilewright.core.env import tune_cpu_runtime
from tilewright.core.hardware import detect_machine
from tilewright.core.load import load_recipe
from tilewright.plan import ceilings
from tilewright.training.assemble import Parts, Setup, build, set_up
from tilewright.training.checkpoint import CheckpointStore
from tilewright.training.evaluate import evaluate
from tilewright.training.regroup_run import regroup_for

CLAIM = "planned peak within 10 % of the measured one before the first step and 5 % after it; step time within 15 %"
MODELS = {
    "decoder": ("default", {}),
    "experts": ("tiny_moe", {}),
    "llama": ("default", {"model.kind": "hf", "model.task": "causal_lm"}),
}
PLANS: dict[str, dict[str, str]] = {
    "as it stands": {},
    "budget": {},
    "recomputed": {"train.activation_checkpoint": "full"},
    "layer_major": {"memory.executor": "layer_major", "optim.moments": "8bit", "memory.states": "disk"},
}
SHARE = 0.85
ERRORS = ("error_before", "error_before_steps", "error_after", "step_error")


def worker(recipe: str, settings: dict[str, str], steps: int) -> dict[str, Any]:
    """Train a few steps; what was planned, expected and measured."""
    setup = set_up(load_recipe(recipe, settings, environ={}))
    parts = build(setup, fresh=True)
    events: list[str] = []
    regroup = regroup_for(setup, parts, Telling(events))
    found: dict[str, Any] = {"before_bytes": setup.plan.peak_bytes + setup.plan.reserve_bytes}
    found["before_steps_bytes"] = setup.plan.phase_bytes(setup.plan.step_phase) + setup.plan.reserve_bytes
    found |= {"before_step_s": setup.plan.step_s, "peaks": [], "step_s": []}
    found["planned"] = {name: dict(owners) for name, owners in setup.plan.phases.items()}
    for number in range(1, steps + 1):
        if number == steps and regroup.expected_bytes is not None:
            found["after_bytes"] = regroup.expected_bytes
        result = regroup.step(number, parts.stream.next_step(), parts.schedule.lr_at(number - 1))
        memory = parts.ledger.snapshot(parts.model, parts.optimizer)
        found["peaks"].append(max(size for name, size in memory["phases"].items() if name != "load"))
        found["step_s"].append(result.seconds)
    found["measured"] = beyond_steps(setup, parts) | memory["known_phases"]
    found |= {"factor": regroup.memory_factor, "events": events}
    found["placement"] = sorted({str(layer) for layer in parts.executor.placement.layers})
    parts.close()
    return found


def beyond_steps(setup: Setup, parts: Parts) -> dict[str, dict[str, int]]:
    """Bytes by owner while a run evaluates, and while it writes a checkpoint and goes on."""
    recipe, found = setup.recipe, {}
    with parts.passing():
        evaluate(parts.model, parts.eval_batches, device=setup.device, fp32=recipe.precision.eval_fp32)
    found["evaluate"] = parts.ledger.snapshot(parts.model, parts.optimizer)["owners"]
    with tempfile.TemporaryDirectory() as folder:
        store, state = CheckpointStore(Path(folder), background=recipe.save.background), parts.state()
        state.save(store, 1, state.meta())
        parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(0))
        store.close()
    found["checkpoint"] = parts.ledger.snapshot(parts.model, parts.optimizer)["owners"]
    return found


class Telling:
    """Takes the events of a run."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def event(self, step: int, kind: str, text: str, **numbers: object) -> None:
        """As `Recorder.event`."""
        self._events.append(f"step {step}: {text}")


def run(recipe: str, settings: dict[str, str], steps: int) -> dict[str, Any]:
    """A case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.plan_measured", "--worker", json.dumps([recipe, settings])]
    done = subprocess.run([*command, "--steps", str(steps)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{recipe} {settings}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(recipe: str, settings: dict[str, str], steps: int) -> dict[str, Any]:
    """A case, and its errors."""
    # A shared machine has slow minutes: rates of the minute in which the steps are taken. Measured here, because what
    # that leaves in a process is not a run's.
    ceilings.measure(detect_machine("cpu"), refresh=True)
    found = run(recipe, settings, steps)
    peak = max(found["peaks"][1:])
    whole = max(peak, *(sum(owners.values()) for owners in found["measured"].values()))
    found |= {"measured_bytes": whole, "error_before": found["before_bytes"] / whole - 1}
    found |= {"measured_steps_bytes": peak, "error_before_steps": found["before_steps_bytes"] / peak - 1}
    if "after_bytes" in found:
        found["error_after"] = found["after_bytes"] / peak - 1
    seconds = statistics.median(found["step_s"][1:])
    return found | {"measured_step_s": seconds, "step_error": found["before_step_s"] / seconds - 1}


def main() -> None:
    """All cases, written as they end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--worker", type=json.loads)
    args = parser.parse_args()
    if args.worker is not None:
        print(json.dumps(worker(*args.worker, args.steps)))
        return
    tune_cpu_runtime()  # as `tilewright train` does for itself
    torch.set_num_threads(detect_machine("cpu").physical_cores)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        common = {"run.dir": folder, "run.device": "cpu", "plan.enforce": "false"}
        common |= {"save.every": "100", "train.eval_batches": "1"}
        for model in args.only:
            recipe, settings = MODELS[model]
            settings = common | settings | ({"model.path": folder} if model == "llama" else {})
            run(recipe, settings, 1)
            for plan, more in PLANS.items():
                if plan == "budget":
                    whole = results[f"{model}, as it stands"]["before_bytes"]
                    more = {"plan.device_budget": str(int(SHARE * whole))}
                case = results[f"{model}, {plan}"] = measure(recipe, settings | more, args.steps)
                errors = [
                    f"{case[name]:+.1%}" for name in ("error_before", "error_after", "step_error") if name in case
                ]
                print(f"{model}, {plan}: {case['measured_bytes'] / 2**20:.0f} MiB, {' '.join(errors)}", flush=True)
                worst = {name: max(abs(row.get(name, 0.0)) for row in results.values()) for name in ERRORS}
                write_result(f"plan_measured_{machine_kind()}", CLAIM, {"cases": results, "worst": worst})


if __name__ == "__main__":
    main()
