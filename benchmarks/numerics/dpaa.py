"""The precision controller on a case that FP8 alone cannot learn, and on one where it has nothing to do.

stress: outliers in what every layer reads (benchmarks/numerics/outliers.py): in BF16 they change nothing, in FP8 the
forward matmuls lose all other features of their tiles. calm: the model as it is. Each in bf16_mixed, in static
fp8_tile, and in fp8_tile with the controller; real text, several seeds. Loss is that on held-out text in the formats of
training.

A run takes minutes, so each is kept in `results/dpaa_runs.jsonl` as it ends, and a later call continues where the last
one stopped. The result is made of all runs with the same number of steps.

python -m benchmarks.numerics.dpaa [--steps 400] [--seeds 3] [--cases stress calm]
"""

import statistics
from typing import Any

from benchmarks.common import RESULTS, parser_of, write_result
from benchmarks.kept_rows import KeptRows
from benchmarks.numerics.outliers import plant_everywhere
from tilewright.core.config.load import load_recipe
from tilewright.data.batches.microbatches import count_targets
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.training.assemble import Components, build, prepare_data, set_up
from tilewright.training.executor.evaluate import evaluate, pooled
from tilewright.training.hooks.precision_hook import PrecisionHook

CLAIM = (
    "stress: static fp8_tile fails (over 5 % above BF16's loss), with the controller within 0.5 % of BF16; "
    "calm: at least 95 % of the matmuls' work stays in 8 bits; three seeds"
)
RUNS = KeptRows(RESULTS / "dpaa_runs.jsonl")
MODES = ("bf16_mixed", "fp8_tile", "controller")
CASES = ("stress", "calm")
SHAPE = {
    "model.dim": "128",
    "model.num_layers": "2",
    "model.num_heads": "2",
    "data.vocab_size": "1024",
    "data.max_bytes": "4MB",
    "data.seq_len": "128",
    "train.global_batch_size": "8",
    "train.micro_batch_size": "8",
    "train.eval_batches": "4",
    "optim.lr": "3e-3",
    "run.device": "cpu",
    "train.compile": "off",
}
CONTROL = {
    "precision.controller.enabled": "true",
    "precision.controller.interval": "25",
    "precision.controller.cooldown": "50",
    "precision.controller.budget": "1.0",
    "precision.controller.recalibrate_interval": "100",
}


def run(case: str, mode: str, seed: int, steps: int) -> dict[str, Any]:
    """Held-out loss of one run; of the controller also the share of the work in 8 bits, step by step."""
    changes = {
        "precision.mode": "bf16_mixed" if mode == "bf16_mixed" else "fp8_tile",
        "precision.bf16_grad_layers": "[]",
    }
    changes |= CONTROL if mode == "controller" else {}
    loaded = load_recipe("cpu_10m", SHAPE | changes | {"run.seed": str(seed), "train.steps": str(steps)}, environ={})
    parts = build(set_up(loaded), fresh=True)
    if case == "stress":
        plant_everywhere(parts.model)
        parts.modes.weights.refresh()
    hook = parts.hook(PrecisionHook)
    control = hook.control if hook is not None else None
    shares, events = [], {"redone": 0, "skipped": 0, "moves": 0}
    for step in range(steps):
        microbatches = parts.stream.next_step()
        if control is not None:
            control.enter(step)
            if control.due(step):
                sample(parts, control, step, microbatches)
        result = parts.executor.step(microbatches, parts.schedule.lr_at(step))
        if control is not None:
            if control.controller.suspect is not None:
                sample(parts, control, step, microbatches)
            shares.append(1 - control.controller.share_above_8bit)
            events["moves"] += sum(row["kind"] == "move" for row in control.take_rows())
        events["redone"] += result.redone is not None
        events["skipped"] += result.skipped is not None
    whole = pooled(evaluate(parts.model, parts.held_out.batches, fp32=False))
    parts.stream.close()
    found = {"loss": whole.loss if whole is not None else float("nan"), **events}
    found |= {"data": parts.setup.prepared.fingerprint}
    return found | ({"share_8bit": statistics.fmean(shares), "share_8bit_end": shares[-1]} if shares else {})


def sample(parts: Components, control: PrecisionController, step: int, microbatches) -> None:
    """A sample of one row, as runs from a recipe take it."""
    batch = {name: tensor[:1].to(parts.setup.device) for name, tensor in microbatches[0].items()}
    control.sample(step, [lambda: (parts.model.loss(batch).loss_sum / max(count_targets([batch]), 1)).backward()])


def known_runs(steps: int, data: str) -> dict[tuple[str, str, int], dict[str, Any]]:
    """What the runs that are there on this text gave, by case, mode and seed."""
    return {
        (row["case"], row["mode"], row["seed"]): row["found"]
        for row in RUNS.of(steps=steps)
        if row["found"]["data"] == data
    }


def summary(runs: dict[tuple[str, str, int], dict[str, Any]], steps: int) -> dict[str, Any]:
    """By case and mode: losses, gaps to BF16 seed by seed, and what the controller did."""
    results: dict[str, Any] = {"unit": "nats a token", "steps": steps}
    for case in CASES:
        results[case] = {}
        for mode in MODES:
            found = {seed: one for (c, m, seed), one in sorted(runs.items()) if (c, m) == (case, mode)}
            base = {
                seed: runs[case, "bf16_mixed", seed]["loss"] for seed in found if (case, "bf16_mixed", seed) in runs
            }
            gaps = {seed: 100 * (found[seed]["loss"] / base[seed] - 1) for seed in base}
            results[case][mode] = {"runs": found, "gap_percent": gaps}
    return results


def main() -> None:
    """Make the runs that are missing, seed by seed, and write the result after each."""
    parser = parser_of(__doc__, steps=400, seeds=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    args = parser.parse_args()
    data = prepare_data(load_recipe("cpu_10m", SHAPE, environ={}).recipe).fingerprint
    runs = known_runs(args.steps, data)
    write_result("dpaa", CLAIM, summary(runs, args.steps))
    for seed in range(args.seeds):
        for case in args.cases:
            for mode in MODES:
                if (case, mode, seed) in runs:
                    continue
                found = runs[case, mode, seed] = run(case, mode, seed, args.steps)
                RUNS.add({"case": case, "mode": mode, "seed": seed, "steps": args.steps, "found": found})
                write_result("dpaa", CLAIM, summary(runs, args.steps))


if __name__ == "__main__":
    main()
