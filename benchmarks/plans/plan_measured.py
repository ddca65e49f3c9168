"""Planned beside measured: five models under several plans each, before the first step and after it.

Models: the default decoder, one of 48 layers that are 128 wide, recipe tiny_moe (mixture of experts, latent attention),
a Hugging Face Llama, a Hugging Face Qwen3. Plans:

  as it stands   the recipe fits, and nothing is decided
  budget         `plan.device_memory` at 85 % of what the recipe would take: `memory.plan = "auto"` decides
  selective, recomputed    `train.activation_checkpoint = "selective"`, `"full"`
  layer_major    the layer-major executor, 8-bit moments on disk
  fp8_tile, fp32           `precision.mode`
  moments bf16, 8bit       `optim.moments`
  small rows     half the rows in a micro-batch

`order` is the rank correlation (Spearman's) of planned and measured seconds over the plans of a model: whether the
alternatives that a plan offers are as fast among each other as it says.

Each runs in a process of its own, re-planning as `tilewright train` does: steps, an evaluation, and a checkpoint with a
step beside it. `before` is what the plan said of the whole run, against its highest whole-process peak; `before_steps`
the same of the steps alone; `after` what the run expected of a step once the first ones had been measured.

Seconds of a shared machine change by the minute, by a half and more, and seconds planned in a fast minute say nothing
of steps taken in a slow one. So the four runs of a model take their steps in turns, and between the turns the machine's
ceilings are measured again and again; steps and measurements during which a hypervisor gave more than 3 % of the
processors to other machines do not count, and turns continue until enough do (a case in which they never do has no
`step_error`, and the result says so). `step_error` is what the planner says of a step with the middle one of all these
rates, over the median step after a memory plan's first; `step_error_before` what it said when the run began, with rates
measured just before; `step_s_each` with each measurement alone, as the run's `step_s` are of each step. A first pass,
not counted, prepares data and kernels.

With `--device cuda` three models, wide enough for a GPU, under four plans each; `layer_major` has its moments in host
memory then.

python -m benchmarks.plans.plan_measured [--rounds 8] [--only MODEL ...] [--device cuda] [--tiny]
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from benchmarks.common import Deadline, Stolen, machine_kind, parser_of, watched_step, write_result
from benchmarks.worker import TurnTaker, tell
from tilewright.core.config.load import load_recipe
from tilewright.core.env import tune_cpu_runtime
from tilewright.core.hardware import detect_machine
from tilewright.core.memory_plan import MemoryPlan
from tilewright.planner.cost.layer_choices import GlobalConfig
from tilewright.planner.machine import ceilings
from tilewright.training.assemble import Components, RunContext, build, set_up
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore
from tilewright.training.executor.evaluate import evaluate
from tilewright.training.hooks.replan_setup import replanner_for
from tilewright.training.planning.resolve_plan import plan_run

CLAIM = (
    "planned peak within 10 % of the measured one before the first step and 5 % after it; step time within 15 %; plans "
    "in the order of their measured seconds (rank correlation 0.9)"
)
PLANS: dict[str, dict[str, str]] = {
    "as it stands": {},
    "budget": {},
    "selective": {"train.activation_checkpoint": "selective"},
    "recomputed": {"train.activation_checkpoint": "full"},
    "layer_major": {"memory.executor": "layer_major", "optim.moments": "8bit", "memory.offload_optimizer": "disk"},
    "fp8_tile": {"precision.mode": "fp8_tile"},
    "fp32": {"precision.mode": "fp32"},
    "moments bf16": {"optim.moments": "bf16"},
    "moments 8bit": {"optim.moments": "8bit"},
    "small rows": {"train.micro_batch_size": "4"},
}
FOUR = ("as it stands", "budget", "recomputed", "layer_major")
DECODER_ONLY = ("model.dim", "model.num_heads", "model.ffn_dim")
FOREIGN = {"model.kind": "hf", "model.task": "causal_lm"}
DEEP = {"model.dim": "128", "model.num_layers": "48", "model.num_heads": "2", "data.seq_len": "256"}
MODELS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "decoder": ("cpu_10m", {}, tuple(PLANS)),
    "deep": ("cpu_10m", DEEP, FOUR),
    "experts": ("tiny_moe", {}, FOUR),
    "llama": ("cpu_10m", FOREIGN, (*FOUR, "selective", "fp8_tile")),
    "qwen3": ("cpu_10m", FOREIGN, FOUR),
}
WIDE = {
    "model.dim": "1024", "model.num_heads": "16", "model.ffn_dim": "2816", "data.seq_len": "1024",
    "train.global_batch_size": "16", "train.micro_batch_size": "8",
}  # fmt: skip
ON_CUDA: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "decoder": ("cpu_10m", WIDE | {"model.num_layers": "12"}, FOUR),
    "experts": ("tiny_moe", WIDE | {"model.num_layers": "6", "model.expert_dim": "1024"}, FOUR),
    "llama": ("cpu_10m", {key: value for key, value in (FOREIGN | WIDE).items() if key not in DECODER_ONLY}, FOUR),
}
LLAMA = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 6,
    "num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
WIDE_LLAMA = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 1024, "vocab_size": 32768,
}  # fmt: skip
TINY = {
    "data.seq_len": "64", "data.vocab_size": "512", "data.max_bytes": "2MB", "train.compile": "off",
    "train.global_batch_size": "4", "train.micro_batch_size": "4",
}  # fmt: skip
TINY_DECODER = {
    "model.dim": "64", "model.num_layers": "3", "model.num_heads": "2", "model.num_kv_heads": "2",
    "model.ffn_dim": "128",
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 128}
SHARE = 0.85
STOLEN = 0.03
"""Of the processors' time, above which seconds say more of other machines than of this one."""
ENOUGH = 5
"""Steps of each run, and measurements of the ceilings, that count."""
PATIENCE = 4
"""Times the rounds that were asked for, after which a run has the steps that it has."""
ERRORS = ("error_before", "error_before_steps", "error_after", "step_error", "step_error_before")


def worker(recipe: str, settings: dict[str, str]) -> None:
    """A step for each line on stdin; the last line is the machine's rates. What was planned, expected and measured."""
    setup = set_up(load_recipe(recipe, settings, environ={}))
    parts = build(setup, fresh=True)
    events: list[str] = []
    replanner = replanner_for(setup, parts, Telling(events))
    found: dict[str, Any] = {"before_bytes": setup.plan.to_json()["peak_bytes"] + setup.plan.reserve_bytes}
    found["before_steps_bytes"] = setup.plan.allocated_bytes + setup.plan.reserve_bytes
    found |= {"before_step_s": setup.plan.step_s, "peaks": [], "step_s": [], "stolen": [], "regrouped": []}
    found["planned"] = {name: dict(owners) for name, owners in setup.plan.tracked.items()}
    began = memory_plan = parts.executor.memory_plan
    tell({})
    for number, line in enumerate(sys.stdin, 1):
        if not line.startswith("step"):
            break
        with Stolen() as stolen:
            result = watched_step(replanner, number, parts.stream.next_step(), parts.schedule.lr_at(number - 1))
        memory = parts.memory_tracker.snapshot(parts.model, parts.optimizer)
        found["peaks"].append(max(size for name, size in memory["phases"].items() if name != "load"))
        found["step_s"].append(result.seconds)
        found["stolen"].append(stolen.share)
        if parts.executor.memory_plan != memory_plan:
            memory_plan = parts.executor.memory_plan
            found["regrouped"].append(number)
        tell({"stolen": stolen.share})
    if replanner.expected is not None:
        found["after_bytes"] = replanner.peak_bytes
    message = json.loads(line)
    several = [ceilings.Ceilings.from_json(rates) for rates in message["rates"]]
    counted = [rates for rates, share in zip(several, message["stolen"], strict=True) if share <= STOLEN]
    now = None if memory_plan == began else memory_plan
    found["rates_stolen"] = message["stolen"]
    found["step_s_planned"] = step_s(setup, now, ceilings.middle(counted or several))
    found["step_s_each"] = [step_s(setup, now, rates) for rates in several]
    found["measured"] = (
        beyond_steps(setup, parts) | parts.memory_tracker.snapshot(parts.model, parts.optimizer)["known_phases"]
    )
    found |= {"factor": replanner.memory_factor, "events": events}
    found["placement"] = sorted({str(layer) for layer in memory_plan.layers})
    parts.close()
    tell(found)


def step_s(setup: RunContext, memory_plan: MemoryPlan | None, rates: ceilings.Ceilings) -> float:
    """Seconds of a step that the planner says, with these rates; of another memory plan than the run began with."""
    site = replace(setup.site, rates=rates)
    if not setup.plan.decided and memory_plan is None:
        return plan_run(setup.loaded, site)[1].step_s
    where = memory_plan or setup.memory_plan
    assert where is not None
    return site.planner(setup.recipe).priced(GlobalConfig.of(setup.recipe), where, site.budget(setup.recipe)).step_s


def beyond_steps(setup: RunContext, parts: Components) -> dict[str, dict[str, int]]:
    """Bytes by owner while a run evaluates, and while it writes a checkpoint and continues."""
    recipe, found = setup.recipe, {}
    with parts.executor.access.forward_passes(parts.model):
        evaluate(parts.model, parts.held_out.batches, device=setup.device, fp32=recipe.precision.eval_fp32)
    found["evaluate"] = parts.memory_tracker.snapshot(parts.model, parts.optimizer)["owners"]
    with tempfile.TemporaryDirectory() as folder:
        store, state = CheckpointStore(Path(folder), background=recipe.checkpoint.async_save), parts.state()
        state.save(store, 1, state.meta())
        parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(0))
        store.close()
    found["checkpoint"] = parts.memory_tracker.snapshot(parts.model, parts.optimizer)["owners"]
    return found


class Telling:
    """Takes the events of a run."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def event(self, step: int, kind: str, text: str, **numbers: object) -> None:
        """As `Recorder.event`."""
        self._events.append(f"step {step}: {text}")


class Case(TurnTaker):
    """A run in a process of its own, ready for its first step."""

    def __init__(self, recipe: str, settings: dict[str, str]) -> None:
        super().__init__("a case", "plans.plan_measured", "--worker", json.dumps([recipe, settings]))
        self.answer()

    def step(self) -> bool:
        """Take one; whether its seconds count."""
        return self.ask("step")["stolen"] <= STOLEN

    def found(self, rates: Sequence[tuple[ceilings.Ceilings, float]]) -> dict[str, Any]:
        """What was found, with the machine's rates each time they were measured, and what was stolen meanwhile."""
        message = {"rates": [one.to_json() for one, _ in rates], "stolen": [share for _, share in rates]}
        return self.ask(json.dumps(message))


def measure(
    recipe: str,
    settings: dict[str, str],
    plans: Sequence[str],
    rounds: int,
    patience: int,
    refresh: bool,
    deadline: Deadline,
) -> dict[str, dict[str, Any]]:
    """The plans of a model in turns, and their errors."""
    # Measured here and not in a case's process, because what that leaves there is not a run's.
    device = settings["run.device"]
    rates = [measured_rates(device, refresh)]
    cases: dict[str, Case] = {}
    whole = 0.0
    for plan in plans:
        more = {"plan.device_memory": str(int(SHARE * whole))} if plan == "budget" else PLANS[plan]
        if device == "cuda" and "memory.offload_optimizer" in more:
            more = more | {"memory.offload_optimizer": "cpu"}
        cases[plan] = Case(recipe, settings | more)
        cases[plan].step()  # compiles
        if plan == "as it stands":
            whole = planned_bytes(recipe, settings)
    counted = dict.fromkeys(cases, 0)
    for turn in range(1, patience * rounds + 1):
        if turn > 1 and not deadline.left():
            break
        for plan, case in cases.items():
            counted[plan] += case.step()
        rates.append(measured_rates(device, refresh))
        enough = min(*counted.values(), sum(share <= STOLEN for _, share in rates)) >= ENOUGH
        if enough and turn >= rounds:
            break
    return {plan: errors(case.found(rates)) for plan, case in cases.items()}


def measured_rates(device: str, refresh: bool) -> tuple[ceilings.Ceilings, float]:
    """The ceilings now (or, not refreshed, those that the machine keeps), and what was stolen meanwhile."""
    with Stolen() as stolen:
        found = ceilings.measure(detect_machine(device), refresh=refresh)
    return found, stolen.share


def planned_bytes(recipe: str, settings: dict[str, str]) -> float:
    """What the whole run is planned to take as it stands."""
    plan = set_up(load_recipe(recipe, settings, environ={})).plan
    return plan.peak_bytes + plan.reserve_bytes


def errors(found: dict[str, Any]) -> dict[str, Any]:
    """A case with what was planned and expected over what was measured."""
    peak = max(found["peaks"][1:])
    whole = max(peak, *(sum(owners.values()) for owners in found["measured"].values()))
    found |= {"measured_bytes": whole, "error_before": found["before_bytes"] / whole - 1}
    found |= {"measured_steps_bytes": peak, "error_before_steps": found["before_steps_bytes"] / peak - 1}
    if "after_bytes" in found:
        found["error_after"] = found["after_bytes"] / peak - 1
    # The first step under a memory plan compiles; a re-planning comes after its step.
    steps = list(zip(found["step_s"], found["stolen"], strict=True))[1 + max(found["regrouped"], default=0) :]
    counted = [seconds for seconds, share in steps if share <= STOLEN]
    found |= {"counted_steps": len(counted), "counted_rates": sum(share <= STOLEN for share in found["rates_stolen"])}
    if min(found["counted_steps"], found["counted_rates"]) < ENOUGH:
        return found
    seconds = statistics.median(counted)
    found |= {"measured_step_s": seconds, "step_error": found["step_s_planned"] / seconds - 1}
    return found | {"step_error_before": found["before_step_s"] / seconds - 1}


def main() -> None:
    """All cases, written as a model's end."""
    parser = parser_of(__doc__, tiny=True, seconds=True, rounds=8)
    parser.add_argument("--only", nargs="*", choices=tuple(MODELS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--worker", type=json.loads)
    args = parser.parse_args()
    if args.worker is not None:
        worker(*args.worker)
        return
    tune_cpu_runtime()  # as `tilewright train` does for itself
    torch.set_num_threads(detect_machine("cpu").physical_cores)
    results: dict[str, Any] = {}
    deadline, late = Deadline(args.seconds), {}
    with tempfile.TemporaryDirectory() as folder:
        wide = args.device == "cuda"
        models = ON_CUDA if wide or args.tiny else MODELS
        foreign = {"llama": LLAMA | (WIDE_LLAMA if wide and not args.tiny else {}), "qwen3": QWEN3}
        for name, config in foreign.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(config))
        order: dict[str, float] = {}
        common = {"run.dir": folder, "run.device": args.device, "plan.enforce": "false"}
        common |= {"checkpoint.interval": "100", "train.eval_batches": "1"}
        for model in args.only or models:
            if deadline.passed(model, late):
                break
            recipe, settings, plans = models[model]
            if args.tiny:
                settings = settings | TINY | ({} if model in foreign else TINY_DECODER)
            settings = common | settings | ({"model.path": f"{folder}/{model}"} if model in foreign else {})
            planned_bytes(recipe, settings)  # prepares the data
            patience = 1 if args.tiny or wide else PATIENCE
            cases = measure(recipe, settings, plans, args.rounds, patience, refresh=not args.tiny, deadline=deadline)
            pairs = [(row["step_s_planned"], row["measured_step_s"]) for row in cases.values() if "step_error" in row]
            if len(pairs) > 2:
                order[model] = float(spearmanr(*zip(*pairs, strict=True)).statistic)
                print(f"{model}: order {order[model]:.2f} over {len(pairs)} plans")
            for plan, case in cases.items():
                results[f"{model}, {plan}"] = case
                found = ", ".join(f"{name} {case[name]:+.1%}" for name in ERRORS if name in case)
                seconds = "" if "step_error" in case else ", seconds of too few steps count"
                print(f"{model}, {plan}: {case['measured_bytes'] / 2**20:.0f} MiB, {found}{seconds}", flush=True)
            worst = {
                name: max((abs(row[name]) for row in results.values() if name in row), default=None) for name in ERRORS
            }
            disturbed = [name for name, row in results.items() if "step_error" not in row]
            found = {"cases": results, "worst": worst, "order": order, "without_seconds": disturbed}
            kind = "tiny" if args.tiny else "cuda" if wide else machine_kind()
            write_result(f"plan_measured_{kind}", CLAIM, found)


if __name__ == "__main__":
    main()
