"""Which part of FP8 costs loss: a small model on the default data with 8 bits in some of its matmuls only.

Three layers of 192, 300 steps of 1024 tokens, not compiled: a minute or more a run. Two runs that differ in rounding
alone part by a percent here, so only many seeds say something about a part (docs/log.md). Each run is kept in
`results/quality_parts.jsonl` as it ends; a later call makes what is missing.

python -m benchmarks.numerics.quality_parts [--seeds 4] [--parts bf16_mixed fp8_tile fprop backward ...]
"""

import argparse
import json
import statistics
from dataclasses import replace

import torch

from benchmarks.common import RESULTS, machine_kind
from tilewright.core.config.load import load_recipe
from tilewright.precision.convert import evaluating, set_mode
from tilewright.precision.policy.policy import Policy, Rule
from tilewright.training.assemble import Components, build, prepare_data, set_up

STEPS = 300
RUNS = RESULTS / "quality_parts.jsonl"
RULES = {
    "fp8_tile": (),
    "fprop": (Rule("*", op="linear", dgrad="bf16", wgrad="bf16"),),
    "backward": (Rule("*", op="linear", fprop="bf16"),),
    "attention_bf16": (Rule("*self_attn*", op="linear", compute="bf16"),),
    "mlp_bf16": (Rule("*mlp*", op="linear", compute="bf16"),),
    "first_layer_bf16": (Rule("*layers.0.*", op="linear", compute="bf16"),),
    "first_query_bf16": (Rule("*layers.0.self_attn.q_proj", op="linear", fprop="bf16"),),
    "v_fprop_bf16": (Rule("*.v_proj", op="linear", fprop="bf16"),),
    "qk_fprop_bf16": (Rule("*.q_proj", op="linear", fprop="bf16"), Rule("*.k_proj", op="linear", fprop="bf16")),
}
"""What is in 8 bits: all matmuls, and exceptions."""
SETTINGS = {
    "precision.mode": "bf16_mixed", "train.compile": "off", "model.dim": "192", "model.num_layers": "3",
    "model.num_heads": "3", "data.seq_len": "256", "train.global_batch_size": "4", "train.micro_batch_size": "4",
    "train.steps": str(STEPS), "train.eval_batches": "8",
}  # fmt: skip


def policy_of(part: str, base: Policy) -> Policy:
    """The policy of a part's run."""
    return base if part == base.mode else replace(base.in_mode("fp8_tile"), rules=RULES[part])


def run(part: str, seed: int) -> dict[str, float | str]:
    """Held-out loss (in FP32) and mean training loss of the last 50 steps, nats a token; the text's fingerprint."""
    parts = build(set_up(load_recipe("cpu_10m", {**SETTINGS, "run.seed": str(seed)}, environ={})), fresh=True)
    set_mode(parts.model, policy_of(part, parts.modes.policy))
    parts.modes.weights.refresh()
    losses = [parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step)).loss for step in range(STEPS)]
    found = {"held_out": _held_out(parts), "training": statistics.fmean(losses[-50:])}
    found |= {"data": parts.setup.prepared.fingerprint}
    parts.stream.close()
    return found


@torch.no_grad()
def _held_out(parts: Components) -> float:
    batches = [batch for of_domain in parts.held_out.batches.values() for batch in of_domain]
    with evaluating(parts.model):
        total = sum(float(parts.model.loss(batch).loss_sum) for batch in batches)
    return total / sum(int((batch["labels"] != -100).sum()) for batch in batches)


def main() -> None:
    """Make the missing runs, then print mean and standard deviation of each part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--parts", nargs="+", choices=("bf16_mixed", *RULES), default=("bf16_mixed", *RULES))
    args = parser.parse_args()
    data = prepare_data(load_recipe("cpu_10m", SETTINGS, environ={}).recipe).fingerprint
    rows = [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []
    rows = [row for row in rows if row["data"] == data]  # losses on other texts cannot be compared
    done = {(row["part"], row["seed"]) for row in rows}
    for seed in range(args.seeds):
        for part in args.parts:
            if (part, seed) in done:
                continue
            rows.append({"part": part, "seed": seed, **run(part, seed), "machine": machine_kind()})
            with RUNS.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    for part in args.parts:
        losses = [row["held_out"] for row in rows if row["part"] == part]
        spread = f" +- {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        print(f"{part:18} {statistics.fmean(losses):.4f}{spread} ({len(losses)} seeds)")


if __name__ == "__main__":
    main()
