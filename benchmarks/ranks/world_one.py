"""One process started by torchrun against the same run started without: seconds per step, in pairs.

A pair is two runs one after the other, the first of them in turn the one and the other. Of each run the median step
counts, the first ones left out; the losses of all runs must be equal to the last bit.

python -m benchmarks.ranks.world_one --pairs 6 --seconds 240
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.common import machine_kind, spread, write_result
from benchmarks.run_command import step_rows, train, train_command
from benchmarks.turns import ratio

CLAIM = "a run of one process under torchrun has the losses of the plain run bit for bit, and its step time within 2 %"
FIRST = 10
"""Steps that warm up."""
SETTINGS = {
    "run.name": "job", "run.device": "cpu", "data.max_bytes": "1MB", "data.vocab_size": "2048", "model.dim": "128",
    "model.num_layers": "4", "model.num_heads": "2", "data.seq_len": "128", "train.global_batch_size": "8",
    "train.micro_batch_size": "8", "train.eval_interval": "0", "train.sample_tokens": "0", "train.log_interval": "50",
    "checkpoint.interval": "0", "checkpoint.interval_minutes": "0", "checkpoint.save_last": "false",
    "log.report": "false",
}  # fmt: skip
RANKS = {"plain": 0, "torchrun": 1}


def steps(how: str, base: Path, count: int, threads: int) -> tuple[list[float], list[float]]:
    """Seconds of the steps of a run, and their losses."""
    settings = SETTINGS | {"run.dir": str(base / how), "data.cache_dir": str(base / "cache")}
    settings |= {"train.steps": str(count), "run.threads": str(threads)}
    command = train_command("zero_cpu", settings, ranks=RANKS[how])
    train(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    found = step_rows(base / how / "job")
    shutil.rmtree(base / how)
    return [row["step_s"] for row in found], [row["loss"] for row in found]


def main() -> None:
    """Run the pairs, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=600.0, help="no pair begins that would end later")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    medians: dict[str, list[float]] = {how: [] for how in RANKS}
    losses = []
    with tempfile.TemporaryDirectory() as name:
        steps("plain", Path(name), FIRST, args.threads)  # the data are in the cache from here on
        began = time.monotonic()
        for pair in range(args.pairs):
            if (time.monotonic() - began) * (pair + 1) > args.seconds * max(pair, 1):
                break
            for how in sorted(RANKS, reverse=bool(pair % 2)):
                seconds, found = steps(how, Path(name), args.steps, args.threads)
                medians[how].append(statistics.median(seconds[FIRST:]))
                losses.append(found)
            print(f"pair {pair + 1}: {medians['torchrun'][-1] / medians['plain'][-1] - 1:+.2%}", flush=True)
    results = {
        "pairs": len(medians["plain"]),
        "steps": args.steps,
        "threads": args.threads,
        "step_s": {how: spread(found) for how, found in medians.items()},
        "torchrun_to_plain": ratio(medians["torchrun"], medians["plain"]),
        "losses_equal": [found == losses[0] for found in losses],
    }
    print(json.dumps(results, indent=1))
    write_result(f"world_one_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
