"""Losses of the first 20 steps of five shipped recipes, bit for bit: does a change of structure change a number?

python -m benchmarks.golden            train them again, and compare with benchmarks/results/golden_MACHINE.json
python -m benchmarks.golden --write    write that file

Sums depend on the processor's instructions and on the versions of libraries: another machine has another file. The text
is that of the default recipe, so other versions of the installed packages are other data; both are said, not compared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS, machine_facts, machine_kind, write_result

STEPS = 20
SMALL = ("--data.seq_len", "256", "--train.global_batch_size", "2", "--train.micro_batch_size", "1")
RECIPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "fp8_tile": (),
    "hybrid_fp16": (),
    "tiny_moe": (),
    "slice_cpu": SMALL,
}
CLAIM = "A change of structure changes no loss: 20 steps of five shipped recipes, bit for bit"


def losses(recipe: str, settings: tuple[str, ...], folder: Path) -> tuple[list[str], str]:
    """The losses as hexadecimal floats, and the fingerprint of the data."""
    fixed = (
        "--train.steps",
        str(STEPS),
        "--train.eval_interval",
        "0",
        "--checkpoint.save_last",
        "false",
        "--log.report",
        "false",
    )
    command = [sys.executable, "-m", "tilewright", "train", recipe, "--run.name", recipe, *fixed, *settings]
    done = subprocess.run([*command, "--run.threads", "2"], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{recipe} ended with code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    run = folder / "runs" / recipe
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fingerprint = json.loads((run / "data.json").read_text())["fingerprint"]
    return [float(row["loss"]).hex() for row in rows if "loss" in row], fingerprint


def main() -> int:
    """Run; exit code 1 where a loss differs."""
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--write", action="store_true", help="write the file instead of comparing with it")
    parser.add_argument("--only", action="append", choices=RECIPES, help="this recipe only (repeat for more)")
    args = parser.parse_args()
    name = f"golden_{machine_kind()}"
    path = RESULTS / f"{name}.json"
    known = json.loads(path.read_text()) if path.exists() else {"results": {"recipes": {}}}
    rows = known["results"]["recipes"]
    facts, different = machine_facts(), 0
    with tempfile.TemporaryDirectory() as folder:
        for recipe in args.only or RECIPES:
            found, fingerprint = losses(recipe, RECIPES[recipe], Path(folder))
            before = rows.get(recipe)
            if args.write:
                rows[recipe] = {"losses": found, "data": fingerprint, "settings": " ".join(RECIPES[recipe])}
                print(f"{recipe:<12} {float.fromhex(found[0]):.4f} to {float.fromhex(found[-1]):.4f}", flush=True)
                write_result(name, CLAIM, {"recipes": rows})
            elif before is None:
                print(f"{recipe:<12} is not in {path.name}; --write records it")
                different += 1
            elif before["data"] != fingerprint or known["machine"]["versions"] != facts["versions"]:
                print(f"{recipe:<12} not comparable: other data or versions than in {path.name}")
            else:
                same = sum(a == b for a, b in zip(found, before["losses"], strict=False))
                different += same < STEPS
                print(f"{recipe:<12} {same} of {STEPS} losses equal bit for bit", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
