"""Everything that needs a GPU, the most valuable parts first, in three calls of under ten minutes.

python -m benchmarks.gpu            # three times: each goes on where the one before ended
python -m benchmarks.gpu --call 2   # or the second third alone, where the first's files are not at hand

Each part is a process of its own that stops by itself when its time is over, is ended at its limit, and writes
`<part>.json` (under $OUT, else benchmarks/results/gpu) before the next begins: its exit code, seconds, the end of what
it printed, and the results it had written by then, also where it was cut short. Where all is cut short, what the last
part had written is in the folder `under_way`. Parts that are there already are passed over. At the end each number
stands beside its target: `benchmarks.rows.gpu_targets`.

python -m benchmarks.gpu [--call N] [--only PART ...] [--again] [--tiny] [--list] [--minutes 9.2]
"""

import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import RESULTS, current_commit, machine_facts, parser_of
from benchmarks.rows.gpu_targets import TARGETS, table

TAIL_CHARACTERS = 6000
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HYPOTHESIS_PROFILE": "fuzz", "GPU_TESTS_ON": "cpu"}
"""Of parts: tests draw new inputs each time, and run on a CPU where there is no GPU (`tests/gpu/device.py`)."""
TINY_LIMIT_S = 600
"""Of a small form, on whatever processor."""
CALL_S = 9.2 * 60
NO_GPU = """benchmarks.gpu: no CUDA device here, nothing was run.
On a machine with one NVIDIA GPU: python -m benchmarks.gpu, three times, 9.2 minutes each.
Here: --list prints what would run, --tiny runs it at small sizes on the CPU (half an hour)."""
UNDER_WAY = "under_way"
"""Folder of what the part that runs has written so far."""
BEFORE_S = 12
"""What a part with "{seconds}" needs before it looks at the time, and to end: imports, the last write."""
AROUND_S = 45
"""What a part that is given "{minutes}" needs before and after them: imports, data, building, compiling."""


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Args:
        name: of the part and its file.
        arguments: of Python.
        limit_s: it is ended after that, and not begun where a call has less left than `least_s`.
        tiny: arguments of its small form on a CPU.
        least_s: 0: three quarters of the limit.

    "{seconds}" among the arguments becomes the time in which it has to stop, "{minutes}" the time that it may take
    between what it needs before and after.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: int
    tiny: tuple[str, ...]
    least_s: int = 0

    @property
    def needs_s(self) -> float:
        """Seconds without which it is not begun."""
        return self.least_s or 0.75 * self.limit_s


BY_TIME = ("--seconds", "{seconds}")


def _part(limit_s: int, name: str, module: str, *arguments: str, tiny: tuple[str, ...] = ()) -> Part:
    """A part that stops by its time; `tiny`: more arguments of its small form."""
    command = ("-m", f"benchmarks.{module}", *arguments)
    return Part(name, (*command, *BY_TIME), limit_s, (*command, *tiny, "--tiny"))


def _tests(limit_s: int, name: str, *arguments: str) -> Part:
    command = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *arguments)
    return Part(name, command, limit_s, command)


STEP = ("--contenders", "bf16_mixed", "fp8_tile", "torchao_tensorwise", "torchao_rowwise")
HF_LAYERS = ("--only", "trainer", "tilewright_hf_eager", "tilewright_hf")
GENERATE = ("-m", "benchmarks.serving.generate", "--device", "auto", "--transformers", "--turns", "2", "--tokens")
LOSS = ("-m", "benchmarks.card.loss_gpu", "--minutes", "{minutes}")
PLANS = ("-m", "benchmarks.plans.plan_measured", "--rounds")
PARTS = (
    _part(40, "warm", "card.warm_gpu"),
    _part(80, "fp8_gemm", "card.fp8_gpu", "gemm"),
    _part(170, "fp8_step", "card.step_gpu", *STEP),
    _part(35, "attention", "card.attention_gpu"),
    _tests(110, "tests_fp8", "tests/gpu/test_fp8_cuda.py"),
    _part(30, "fp8_quantize", "card.fp8_gpu", "quantize"),
    _tests(80, "tests_rest", "tests/gpu", "--ignore=tests/gpu/test_fp8_cuda.py"),
    _part(215, "largest", "card.memory_gpu", "largest", "--steps", "40"),
    _part(110, "offload", "card.memory_gpu", "offload", "--steps", "3"),
    _part(70, "hf_layers", "runs.throughput", *HF_LAYERS, "--rounds", "6", "--wide", tiny=("--rounds", "2")),
    _part(60, "lora", "card.lora_gpu"),
    _part(80, "offload_24gib", "card.memory_gpu", "offload", "--steps", "3", "--device-gib", "24"),
    Part("loss", LOSS, 180, ("-m", "benchmarks.card.loss_gpu", "--tiny"), least_s=110),
    Part("plan_measured", (*PLANS, "5", "--device", "cuda", *BY_TIME), 90, (*PLANS, "1", "--only", "llama", "--tiny")),
    _part(60, "throughput", "runs.throughput", "--rounds", "3", "--only", "autocast", "tilewright"),
    _part(30, "muon", "numerics.muon_step"),
    Part("generate", (*GENERATE, "256", *BY_TIME), 35, (*GENERATE, "8")),
    _part(35, "ops", "numerics.ops"),
    Part("tiers", ("-m", "benchmarks.runs.tiers", "--slice-mib", "128"), 40, ("-m", "benchmarks.runs.tiers", "--tiny")),
    _part(75, "limit", "card.memory_gpu", "limit"),
)
"""In the order of their value; what each limit adds up to fits into three calls."""


def calls() -> list[tuple[Part, ...]]:
    """The parts of each call: as many, in order, as fit even if each takes all of its limit."""
    found: list[list[Part]] = [[]]
    for part in PARTS:
        if sum(one.limit_s for one in found[-1]) + part.limit_s > CALL_S:
            found.append([])
        found[-1].append(part)
    return [tuple(parts) for parts in found]


def limit_of(part: Part, left_s: float) -> float | None:
    """Seconds that a part is given where a call has so many left; None where it is not begun."""
    return None if left_s < part.needs_s else min(part.limit_s, left_s)


def listing(wanted: Sequence[Part], folder: Path, minutes: float = CALL_S / 60, *, again: bool = False) -> list[str]:
    """What would run if each part took all of its time: call by call, from and to which second, and the command."""
    left = [part for part in wanted if again or not (folder / f"{part.name}.json").exists()]
    lines = [f"{part.name}: there already" for part in wanted if part not in left]
    call = 0
    while left:
        rows, begin, late = [], 0.0, []
        for part in left:
            limit_s = limit_of(part, 60 * minutes - begin)
            if limit_s is None:
                late.append(part)
                continue
            command = "python " + " ".join(within(part.arguments, limit_s))
            rows.append(f"  {begin:4.0f} to {begin + limit_s:4.0f} s  {part.name:14} {command}")
            begin += limit_s
        if not rows:
            return [*lines, *(f"{part.name}: a call of {minutes:g} minutes is too short for it" for part in late)]
        call += 1
        lines += [f"call {call}, {begin:.0f} s at most", *rows]
        left = late
    return lines


def within(arguments: tuple[str, ...], limit_s: float) -> tuple[str, ...]:
    """The arguments of a part that may run for so long."""
    times = {
        "{minutes}": f"{max(limit_s - AROUND_S, 1) / 60:.2f}",
        "{seconds}": f"{max(limit_s - BEFORE_S, 1):.0f}",
    }
    return tuple(times.get(argument, argument) for argument in arguments)


def run_part(part: Part, arguments: tuple[str, ...], limit_s: float, folder: Path) -> dict[str, object]:
    """Run a part, and gather what it wrote. Never raises for what the part does.

    Args:
        folder: where it writes, and its output as `log`: there until the next part, should all of this be ended.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log, start = folder / "log", time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **ENVIRONMENT, "OUT": str(folder)},
        )  # fmt: skip
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its workers with it: they hold the device's memory
            process.wait()
            code = f"ended after {limit_s:.0f} s"
    return {
        "part": part.name,
        "command": "python " + " ".join(arguments),
        "exit_code": code,
        "seconds": round(time.monotonic() - start, 1),
        "results": {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))},
        "output_tail": log.read_text(errors="replace")[-TAIL_CHARACTERS:],
    }


def main() -> None:
    """Run the parts; exit with 1 if one failed."""
    parser = parser_of(__doc__, tiny=True)
    names = tuple(part.name for part in PARTS)
    parser.add_argument("--call", type=int, choices=range(1, len(calls()) + 1), help="parts of this call alone")
    parser.add_argument("--only", nargs="*", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="also parts whose results are there")
    parser.add_argument("--list", action="store_true", help="print what would run and when; run nothing")
    parser.add_argument("--minutes", type=float, default=CALL_S / 60, help="no part runs beyond this")
    args = parser.parse_args()
    folder = Path(os.environ.get("OUT", RESULTS / "gpu"))
    wanted = [
        part for part in (PARTS if args.call is None else calls()[args.call - 1]) if part.name in (args.only or names)
    ]
    if args.list:
        print("\n".join(listing(wanted, folder, args.minutes, again=args.again)))
        return
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit(NO_GPU)
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + (3600 if args.tiny else 60 * args.minutes)
    failed = False
    for part in wanted:
        if (folder / f"{part.name}.json").exists() and not args.again:
            continue
        failed |= not run_in_time(part, folder, end - time.monotonic(), tiny=args.tiny)
    print("\n".join(["", *table(list(TARGETS), folder)]), flush=True)
    sys.exit(int(failed))


def run_in_time(part: Part, folder: Path, left_s: float, *, tiny: bool) -> bool:
    """Run a part where there is time for it, and write its file; whether nothing failed."""
    given_s = limit_of(part, left_s)
    if given_s is None:
        print(f"{part.name}: not run: no time left", flush=True)
        return True
    limit_s = min(TINY_LIMIT_S, left_s) if tiny else given_s
    arguments = within(part.tiny if tiny else part.arguments, limit_s)
    record = run_part(part, arguments, limit_s, folder / UNDER_WAY)
    facts = machine_facts() | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    about = {"commit": current_commit(), "date": datetime.date.today().isoformat(), "tiny": tiny, "machine": facts}
    path = folder / f"{part.name}.json"
    path.with_suffix(".part").write_text(json.dumps({**record, **about}, indent=1) + "\n")
    path.with_suffix(".part").replace(path)
    shutil.rmtree(folder / UNDER_WAY)
    print(f"{part.name}: exit code {record['exit_code']}, {record['seconds']} s", flush=True)
    print("\n".join(str(record["output_tail"]).splitlines()[-12:]), flush=True)
    return record["exit_code"] == 0


if __name__ == "__main__":
    main()
