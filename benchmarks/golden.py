"""Losses of the first 20 steps of shipped recipes on 1, 2 and 4 ranks, bit for bit: does a change of structure change a
number?

python -m benchmarks.golden            train them again, and compare with benchmarks/results/golden_MACHINE.json
python -m benchmarks.golden --write    write that file

Sums depend on the processor's instructions and on the versions of libraries: another machine has its own. The text is
a folder of Python's own library, since that of the default recipe changes with any installed package; another version
of Python or of libraries is said, not compared.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, machine_facts, machine_kind, parser_of, write_result

STEPS = 20
TEXT = ("--data.source", str(Path(sysconfig.get_paths()["stdlib"]) / "idlelib"))
FEW = ("--data.seq_len", "128", "--train.global_batch_size", "8", "--train.micro_batch_size", "1")
FEW += ("--train.compile", "off", "--ops.cross_entropy", "native")
SMALL = ("--data.seq_len", "256", "--train.global_batch_size", "2", "--train.micro_batch_size", "1")


@dataclass(frozen=True)
class Case:
    """A recipe, its settings, and the number of ranks that train it."""

    recipe: str
    settings: tuple[str, ...] = ()
    ranks: int = 1


CASES = {
    "default": Case("default"),
    "fp8_tile": Case("fp8_tile"),
    "hybrid_fp16": Case("hybrid_fp16"),
    "tiny_moe": Case("tiny_moe"),
    "slice_cpu": Case("slice_cpu", SMALL),
    "two_shards": Case("zero_cpu", FEW, 2),
    "two_copies": Case("zero_cpu", ("--parallel.dp_replicate", "2", "--optim.moments", "fp32", *FEW), 2),
    "2x2_moe": Case("tiny_moe", ("--parallel.dp_replicate", "2", "--parallel.dp_shard", "2", *FEW), 4),
}
CLAIM = "A change of structure changes no loss: 20 steps of shipped recipes on 1, 2 and 4 ranks, bit for bit"


def losses(name: str, case: Case, folder: Path) -> tuple[list[str], str]:
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
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks))
    launched = [sys.executable, *(torchrun if case.ranks > 1 else ()), "-m", "tilewright", "train", case.recipe]
    threads = ("--run.threads", "2" if case.ranks == 1 else "1")
    command = [*launched, "--run.name", name, *TEXT, *fixed, *case.settings, *threads]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    run = folder / "runs" / name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fingerprint = json.loads((run / "data.json").read_text())["fingerprint"]
    return [float(row["loss"]).hex() for row in rows if "loss" in row], fingerprint


def main() -> int:
    """Run; exit code 1 where a loss differs."""
    parser = parser_of(__doc__)
    parser.add_argument("--write", action="store_true", help="write the file instead of comparing with it")
    parser.add_argument("--only", action="append", choices=CASES, help="this case only (repeat for more)")
    args = parser.parse_args()
    name = f"golden_{machine_kind()}"
    path = RESULTS / f"{name}.json"
    known = json.loads(path.read_text()) if path.exists() else {"results": {"recipes": {}}}
    rows = known["results"]["recipes"]
    facts, different = machine_facts(), 0
    with tempfile.TemporaryDirectory() as folder:
        for recipe in args.only or CASES:
            found, fingerprint = losses(recipe, CASES[recipe], Path(folder))
            before = rows.get(recipe)
            if args.write:
                rows[recipe] = {"losses": found, "data": fingerprint, "settings": " ".join(CASES[recipe].settings)}
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
