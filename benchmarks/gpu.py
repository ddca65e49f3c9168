"""Everything that needs a GPU, in groups for calls of under ten minutes each, most valuable parts first:

fp8     checks of every kernel, then timings: matmuls and quantisation, a training step, what is left
memory  42 billion parameters on one card; 8 billion beside other tools, then in 24 GiB; the largest model
paths   compiled Hugging Face layers, adapters on an FP8 base, Muon, cached generation, planned beside measured
loss    FP8 with the controller beside BF16, a 1B-shaped model on real text, for the time that is left

Half an hour of one card is three calls, in this order:

python -m benchmarks.gpu fp8
python -m benchmarks.gpu memory
python -m benchmarks.gpu paths loss

Each part is a process of its own with a time limit and writes `<part>.json` (under $OUT, else benchmarks/results/gpu)
before the next begins: its exit code, seconds, the end of what it printed, and the results it had written by then, also
where it was cut short. Parts that are there already are passed over, so an interrupted run continues where it stopped.
At the end each number stands beside its target: `benchmarks.gpu_targets`.

python -m benchmarks.gpu [fp8|memory|paths|loss ...] [--only PART ...] [--again] [--tiny] [--minutes 9.2]
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import RESULTS, current_commit, machine_facts
from benchmarks.gpu_targets import table

TAIL_CHARACTERS = 6000
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HYPOTHESIS_PROFILE": "fuzz", "GPU_TESTS_ON": "cpu"}
"""Of parts: tests draw new inputs each time, and run on a CPU where there is no GPU (`tests/gpu/device.py`)."""
TINY_LIMIT_S = 600
"""Of a small form, on whatever processor."""


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Args:
        name: of the part and its file.
        arguments: of Python.
        limit_s: it is ended after that.
        tiny: arguments of its small form on a CPU.
        least_s: with less time left it is not begun.

    "{minutes}" among the arguments becomes the time that it may take, less what it needs before and after.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: int
    tiny: tuple[str, ...]
    least_s: int = 10


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *arguments)


def _tiny(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name.removeprefix('benchmarks.')}", *arguments, "--tiny")


def _fp8(part: str, *arguments: str) -> Part:
    command = ("-m", "benchmarks.fp8_gpu", part, *arguments)
    limits = {"quantize": 60, "gemm": 90, "step": 200}
    return Part(f"fp8_{part}", command, limits[part], (*command, "--tiny"))


THROUGHPUT = ("-m", "benchmarks.throughput", "--rounds", "3", "--only", "autocast", "tilewright")
FP8_PARTS = (
    Part("tests_fp8", _pytest("tests/gpu/test_fp8_cuda.py"), 150, _pytest("tests/gpu/test_fp8_cuda.py")),
    _fp8("gemm"),
    _fp8("step", "--contenders", "bf16_mixed", "fp8_tile", "torchao_tensorwise", "torchao_rowwise"),
    _fp8("quantize"),
    Part("tests_rest", _pytest("tests/gpu", "--ignore=tests/gpu/test_fp8_cuda.py"), 90, _pytest("tests/gpu")),
    Part("ops", ("-m", "benchmarks.ops"), 60, _tiny("ops")),
    Part("tiers", ("-m", "benchmarks.tiers", "--slice-mib", "128"), 100, ("-m", "benchmarks.tiers", "--tiny")),
    Part("throughput", THROUGHPUT, 100, _tiny(*THROUGHPUT[1:])),
)
OFFLOAD = ("-m", "benchmarks.memory_gpu", "offload", "--steps", "3")
CAPPED = (*OFFLOAD, "--device-gib", "24")
MEMORY_PARTS = (
    Part("largest", ("-m", "benchmarks.memory_gpu", "largest", "--steps", "24"), 290, _tiny("memory_gpu", "largest")),
    Part("offload", OFFLOAD, 150, (*OFFLOAD, "--tiny")),
    Part("offload_24gib", CAPPED, 110, (*CAPPED, "--tiny")),
    Part("limit", ("-m", "benchmarks.memory_gpu", "limit"), 240, _tiny("memory_gpu", "limit"), least_s=120),
)
HF_LAYERS = ("benchmarks.throughput", "--only", "trainer", "tilewright_hf_eager", "tilewright_hf")
GENERATE = ("benchmarks.generate", "--device", "auto", "--transformers", "--turns", "2")
PATHS_PARTS = (
    Part("hf_layers", ("-m", *HF_LAYERS, "--rounds", "6", "--wide"), 90, _tiny(*HF_LAYERS, "--rounds", "2")),
    Part("lora", ("-m", "benchmarks.lora_gpu"), 100, _tiny("lora_gpu")),
    Part("muon", ("-m", "benchmarks.muon_step"), 50, _tiny("muon_step")),
    Part("generate", ("-m", *GENERATE, "--tokens", "256"), 50, ("-m", *GENERATE, "--tokens", "8")),
    Part(
        "plan_measured", ("-m", "benchmarks.plan_measured", "--device", "cuda", "--rounds", "5"), 170,
        _tiny("plan_measured", "--rounds", "1", "--only", "llama"),
    ),
)  # fmt: skip
LOSS = ("-m", "benchmarks.loss_gpu", "--minutes", "{minutes}")
LOSS_PARTS = (Part("loss", LOSS, 560, _tiny("loss_gpu"), least_s=80),)
GROUPS = {"fp8": FP8_PARTS, "memory": MEMORY_PARTS, "paths": PATHS_PARTS, "loss": LOSS_PARTS}
AROUND_S = 45
"""What a part that is given "{minutes}" needs before and after them: imports, data, building, compiling."""


def within(arguments: tuple[str, ...], limit_s: float) -> tuple[str, ...]:
    """The arguments of a part that may run for so long."""
    minutes = f"{max(limit_s - AROUND_S, 1) / 60:.2f}"
    return tuple(argument.replace("{minutes}", minutes) for argument in arguments)


def run_part(part: Part, arguments: tuple[str, ...], limit_s: float) -> dict[str, object]:
    """Run a part, and gather what it wrote. Never raises for what the part does."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        start = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **ENVIRONMENT, "OUT": folder},
            )  # fmt: skip
            try:
                code: int | str = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # its workers with it: they hold the device's memory
                process.wait()
                code = f"ended after {limit_s:.0f} s"
        written = {path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}
        text = log.read_text(errors="replace")
    return {
        "part": part.name,
        "command": "python " + " ".join(arguments),
        "exit_code": code,
        "seconds": round(time.monotonic() - start, 1),
        "results": written,
        "output_tail": text[-TAIL_CHARACTERS:],
    }


def main() -> None:
    """Run the parts; exit with 1 if one failed."""
    parser = argparse.ArgumentParser()
    names = tuple(part.name for parts in GROUPS.values() for part in parts)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)}; fp8 where none is named")
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--again", action="store_true", help="also parts whose results are there")
    parser.add_argument("--tiny", action="store_true", help="small sizes; also on a CPU")
    parser.add_argument("--minutes", type=float, default=9.2, help="no part runs beyond this")
    args = parser.parse_args()
    groups = args.groups or ["fp8"]
    if unknown := set(groups) - GROUPS.keys():
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu: no CUDA device here; --tiny runs the parts at small sizes on a CPU")
    folder = Path(os.environ.get("OUT", RESULTS / "gpu"))
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + (3600 if args.tiny else 60 * args.minutes)
    facts = machine_facts() | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    about = {"commit": current_commit(), "date": datetime.date.today().isoformat()}
    failed = False
    for part in (part for group in groups for part in GROUPS[group]):
        path = folder / f"{part.name}.json"
        arguments = part.tiny if args.tiny else part.arguments
        left_s = end - time.monotonic()
        if part.name not in args.only or (path.exists() and not args.again):
            continue
        if left_s < part.least_s:
            print(f"{part.name}: not run: no time left", flush=True)
            continue
        limit_s = min(TINY_LIMIT_S if args.tiny else part.limit_s, left_s)
        record = run_part(part, within(arguments, limit_s), limit_s)
        path.write_text(json.dumps({**record, **about, "tiny": args.tiny, "machine": facts}, indent=1) + "\n")
        failed |= record["exit_code"] != 0
        print(f"{part.name}: exit code {record['exit_code']}, {record['seconds']} s", flush=True)
        print("\n".join(str(record["output_tail"]).splitlines()[-12:]), flush=True)
    print("\n".join(["", *table(groups, folder)]), flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
