"""Does moving weights help? Held-out loss by domain under five policies of `[data.mixing]`, at equal tokens.

A decoder of 4 layers of width 128 in BF16, compiled, on one thread, on the text that the installation carries, 2
million tokens per run, three seeds. Runs of one seed are a pair: equal first weights of the model, equal order inside
each domain, equal rates; only the policy differs. Policies are compared with two kinds of fixed weights: `static`, each
domain in proportion to its tokens, and `temperature` with a temperature so high that weights are even, which is the
stratified sampling that the authors of Aioli found hard to beat. Of held-out losses there are the mean over domains,
each counting the same, which favours even weights; the mean with each domain counting as its tokens do, which favours
`static`; and the domain with the highest loss. Intervals are of Student's t over the seeds, so with three of them they
are wide, and of a dozen comparisons one may seem decided by chance. An evaluation that the policy is shown comes every
32 steps, the 256 rows from whose end new weights hold.

A run takes minutes, so each is a process of its own and is kept in `results/data_helps_runs.jsonl` as it ends; a later
call continues where the last one stopped. Runs on other text or in another precision are not counted.

python -m benchmarks.data.data_helps [--steps 977] [--seeds 3] [--policies static temperature ppl_guard exp3 aioli]
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine_kind, write_result
from benchmarks.kept_rows import KeptRows
from benchmarks.run_command import TRAIN_ALONE, held_out, rows, train_command
from benchmarks.run_command import train as run_to_end

CLAIM = "moving weights end with a lower held-out loss than fixed ones, at equal tokens, mean and worst domain"
POLICIES = ("static", "temperature", "ppl_guard", "exp3", "aioli")
BASES = ("static", "temperature")
"""Fixed weights, that the others are compared with."""
PRECISION = "bf16_mixed"
ROWS, LENGTH, STEPS = 8, 256, 977  # 977 * 8 * 256 = 2,000,896 tokens
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""97.5 % quantile of Student's t, by the number of seeds."""
MEASURES = ("mean", "by_tokens", "worst")
RUNS = KeptRows(RESULTS / "data_helps_runs.jsonl")
Run = dict[str, Any]


def settings(policy: str, seed: int, steps: int, folder: Path) -> dict[str, object]:
    """Of a run, on top of the recipe `default`."""
    return TRAIN_ALONE | {
        "run.dir": folder, "run.name": "run", "run.seed": seed, "run.device": "cpu", "run.threads": 1,
        "model.dim": "128", "model.num_layers": "4", "model.num_heads": "4", "data.seq_len": str(LENGTH),
        "precision.mode": PRECISION, "train.compile": "on",
        "data.mixing.policy": policy, "data.mixing.interval": "32", "data.mixing.eval_batches": "2",
        "data.mixing.temperature": "1e6",
        "train.minutes": 0, "train.steps": steps, "train.global_batch_size": ROWS, "train.micro_batch_size": ROWS,
        "train.eval_batches": 16, "checkpoint.save_last": "false",
    }  # fmt: skip


def train(policy: str, seed: int, steps: int) -> Run:
    """What one run ends with, trained by the command line."""
    with tempfile.TemporaryDirectory() as name:
        run_to_end(train_command("default", settings(policy, seed, steps, Path(name))))
        folder = Path(name) / "run"
        evaluated, events = held_out(folder), rows(folder / "events.jsonl")
        data = json.loads((folder / "data.json").read_text())
    shown = [event for event in events if event["kind"] == "mix_eval"]
    return {
        "policy": policy, "seed": seed, "steps": steps, "precision": PRECISION,
        "data": data["fingerprint"], "machine": machine_kind(),
        "loss": {name: one["loss"] for name, one in evaluated.items()},
        "weights": {name: one["weight"] for name, one in shown[-1]["domains"].items()} if shown else {},
        "epochs": {name: one["epochs"] for name, one in shown[-1]["domains"].items()} if shown else {},
        "moves": sum(event["kind"] == "mix" for event in events),
        "refusals": sum(event["kind"] == "mix_refused" for event in events),
        "evaluations": len(shown),
    }  # fmt: skip


def known(steps: int) -> list[Run]:
    """Runs of so many steps in this precision that are there, on the text of the newest of them."""
    runs = RUNS.of(steps=steps, precision=PRECISION)
    return [run for run in runs if run["data"] == runs[-1]["data"]]


def interval(differences: Sequence[float]) -> dict[str, Any]:
    """Mean of paired differences and the half of its 95 % interval, which is None of one pair.

    Example:
        >>> found = interval([-0.02, -0.01, -0.03])
        >>> round(found["mean"], 4), round(found["half_width"], 4), found["verdict"]
        (-0.02, 0.0248, 'undecided')
    """
    mean, number = statistics.fmean(differences), len(differences)
    half = None
    if number > 1:
        quantile = STUDENT[max(known for known in STUDENT if known <= number)]  # of fewer seeds it is wider
        half = quantile * statistics.stdev(differences) / math.sqrt(number)
    decided = half is not None and abs(mean) > half
    verdict = ("lower" if mean < 0 else "higher") if decided else "undecided"
    return {"mean": mean, "half_width": half, "pairs": list(differences), "verdict": verdict}


def measures(run: Run, shares: Mapping[str, float]) -> dict[str, float]:
    """The mean over domains, each counting the same, or as its tokens; and the highest loss of a domain.

    Args:
        run: that has ended.
        shares: of the data's tokens, by domain.
    """
    loss = run["loss"]
    by_tokens = sum(share * loss[name] for name, share in shares.items())
    return {"mean": statistics.fmean(loss.values()), "by_tokens": by_tokens, "worst": max(loss.values())}


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """By policy: losses, and differences to fixed weights of the same seed, over all domains and of each."""
    shares = next((run["weights"] for run in runs if run["policy"] == "static"), {})
    found: dict[str, Any] = {"unit": "nats per token, below zero is better than fixed weights", "policies": {}}
    found["shares_of_data"] = shares
    for policy in POLICIES:
        mine = sorted((run for run in runs if run["policy"] == policy), key=lambda run: run["seed"])
        if not mine:
            continue
        row: dict[str, Any] = {
            "seeds": [run["seed"] for run in mine],
            **{name: [measures(run, shares)[name] for run in mine] for name in MEASURES},
            "worst_domain": [max(run["loss"], key=run["loss"].__getitem__) for run in mine],
            "moves": [run["moves"] for run in mine],
            "refusals": [run["refusals"] for run in mine],
            "last_weights": {
                name: statistics.fmean(run["weights"][name] for run in mine) for name in mine[0]["weights"]
            },
            "epochs": {name: statistics.fmean(run["epochs"][name] for run in mine) for name in mine[0]["epochs"]},
        }
        for base in BASES:
            others = {run["seed"]: run for run in runs if run["policy"] == base}
            pairs = [(run, others[run["seed"]]) for run in mine if run["seed"] in others]
            if policy != base and pairs:
                row[f"against_{base}"] = against(pairs, shares)
        found["policies"][policy] = row
    return found


def against(pairs: Sequence[tuple[Run, Run]], shares: Mapping[str, float]) -> dict[str, Any]:
    """Differences of pairs: of the measures, and of each domain's loss."""
    measured = [(measures(run, shares), measures(other, shares)) for run, other in pairs]
    found: dict[str, Any] = {name: interval([one[name] - other[name] for one, other in measured]) for name in MEASURES}
    domains = {name: interval([one["loss"][name] - other["loss"][name] for one, other in pairs]) for name in shares}
    return found | {"domains": domains}


def main() -> None:
    """Make the runs that are missing, seed by seed, and write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    args = parser.parse_args()
    for seed in range(args.seeds):
        for policy in args.policies:
            if any((run["policy"], run["seed"]) == (policy, seed) for run in known(args.steps)):
                continue
            RUNS.add(train(policy, seed, args.steps))
            runs = known(args.steps)
            tokens = args.steps * ROWS * LENGTH
            write_result("data_helps", CLAIM, {"tokens_per_run": tokens, "runs": len(runs), **summary(runs)})


if __name__ == "__main__":
    main()
