"""What a joint plan takes, from import to plan, with no weights and no GPU: the 42B decoder on one H200 (wanted: under
10 s), a 200M decoder (wanted: under 3 s), and well-known models from their config.json alone.

Each case is a process of its own, from the import to the plan, as `tilewright plan RECIPE --on h200` makes it; the
three cheapest changes, which are plans of their own, are timed apart. Wall seconds depend on how busy the machine is,
CPU seconds less.

    python -m benchmarks.plans.plan_solver
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import parser_of, spread, write_result

REPEATS = 2
GIB = 2**30
DENSE_42B = {
    "dim": 7680, "num_layers": 66, "num_heads": 60, "num_kv_heads": 12, "ffn_dim": 20480, "tie_embeddings": False,
}  # fmt: skip
DENSE_200M = {"dim": 1024, "num_layers": 14, "num_heads": 16, "ffn_dim": 2816}
LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_32B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600,
    "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "tie_word_embeddings": False,
}  # fmt: skip

CHILD = """
import json, sys, time
start, cpu = time.perf_counter(), time.process_time()
from tilewright.core.env import gc_paused
with gc_paused():
    from pathlib import Path
    from tilewright.core.config.load import Loaded
    from tilewright.core.config.recipe import Recipe
    from tilewright.core.hardware import detect_machine
    from tilewright.planner.planner import Planner
    from tilewright.planner.plan import Budget
    from tilewright.planner.advice.changes import cheapest_changes
    from tilewright.planner.cost.layer_choices import Links
    from tilewright.planner.machine.gpu_specs import LINK_SHARE, find_published
    from tilewright.planner.site import Site
    from tilewright.training.planning.does_not_fit import replanned
case = json.loads(sys.argv[1])
row = find_published("h200")
machine = row.machine(detect_machine("cpu"), case["host"])
formats = frozenset(("optim.moments", "optim.master_weights"))
recipe = Recipe.model_validate(case["recipe"])
planner = Planner(recipe, case["vocab_size"], machine, row.ceilings(), formats)
budget = Budget(case["device"], case["host"], Links(LINK_SHARE * row.link, None))
plan = planner.plan(budget)
took, used = time.perf_counter() - start, time.process_time() - cpu
found = {"wall_s": took, "cpu_s": used}
if plan is None:
    found["verdict"] = "does not fit"
else:
    if case["changes"]:
        site = Site(case["vocab_size"], machine, row.ceilings(), Path("unused"), given=budget)
        cheapest_changes(planner.recipe, budget, plan, replanned(Loaded(recipe, {}, "case"), site, "fastest"))
    found |= {"verdict": plan.verdict, "num_parameters": plan.shape.num_parameters, "step_s": plan.step_s}
    found["changes_cpu_s" if case["changes"] else "_"] = time.process_time() - cpu - used
found.pop("_", None)
print(json.dumps(found))
"""


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> recipe, vocabulary and budgets."""

    def of(model: dict[str, Any], vocab_size: int, seq_len: int, rows: int, host: int = 128) -> dict[str, Any]:
        recipe = {
            "model": model, "data": {"seq_len": seq_len}, "train": {"global_batch_size": rows, "micro_batch_size": 1},
            "optim": {"clip": "delayed"}, "memory": {"rollback_buffer": "checkpoint"},
        }  # fmt: skip
        return {"recipe": recipe, "vocab_size": vocab_size, "device": 139 * GIB, "host": host * GIB,
                "changes": model.get("kind") != "hf"}  # fmt: skip

    found = {
        "decoder_200m": of(DENSE_200M, 16384, 1024, 16),
        "decoder_42b": of(DENSE_42B, 128256, 8192, 8),
    }
    for name, config in (("llama3_8b", LLAMA_8B), ("qwen3_32b", QWEN3_32B), ("deepseek_v3", DEEPSEEK_V3)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        host = 2048 if name == "deepseek_v3" else 128
        found[f"hf_{name}"] = of({"kind": "hf", "path": str(folder / name)}, config["vocab_size"], 4096, 8, host)
    return found


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Spread of the seconds, and what was planned."""
    runs = []
    for _ in range(REPEATS):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(case)], capture_output=True, text=True, check=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    times = {
        name: spread([run[name] for run in runs]) for name in ("wall_s", "cpu_s", "changes_cpu_s") if name in runs[0]
    }
    rest = {name: value for name, value in runs[0].items() if name not in times}
    return times | rest


def main() -> None:
    """Run all cases, or those named, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        known = cases(Path(folder))
        wanted = {name: known[name] for name in parser_of(__doc__, known).parse_args().cases}
        results = {}
        for name, case in wanted.items():
            results[name] = measure(case)
            print(name, {k: v["median"] if isinstance(v, dict) else v for k, v in results[name].items()}, flush=True)
    claim = "seconds of a joint plan from import to plan; wanted on a quiet machine: 42B under 10, 200M under 3"
    results["load_average"] = [round(value, 1) for value in os.getloadavg()]
    write_result("plan_solver", claim, results)


if __name__ == "__main__":
    main()
