"""What every benchmark writes: the claim, the numbers, and what is needed to make them again."""

import argparse
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from tilewright.core.hardware import Machine

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "accelerate", "triton", "numpy", "torchao", "tilewright")


def machine_facts() -> dict[str, Any]:
    """The hardware and versions a number depends on; nothing that names a host or a user."""
    from tilewright.core.hardware import detect_machine

    machine = detect_machine()
    return {
        "device": machine.device_name,
        "cores": machine.physical_cores,
        "host_memory_gib": round(machine.host_memory_bytes / 2**30, 1),
        "cpu_features": sorted(f for f in machine.cpu_features if f.startswith(("amx", "avx512_bf16", "avx512_fp16"))),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES if _version(name)},
    }


def place(record: dict[str, Any]) -> str:
    """Where a result was measured, in few words."""
    machine = record["machine"]
    unit = "AMX" if "amx_bf16" in machine["cpu_features"] else "AVX-512" if machine["cpu_features"] else ""
    maker = machine["device"].replace("(R)", "").removesuffix("Processor").strip()
    cores = machine["cores"]
    return f"{cores} core{'s' if cores > 1 else ''} {maker} {unit}".strip()


def machine_kind(machine: "Machine | None" = None) -> str:
    """What the speed of a machine, by default this one, depends on most, for the name of its result file: cuda, amx,
    avx512, avx2 (alone), or cpu, which is any other one."""
    from tilewright.core.hardware import detect_machine

    machine = machine or detect_machine()
    if machine.device == "cuda":
        return "cuda"
    kinds = {"amx_bf16": "amx", "avx512_bf16": "avx512", "avx512f": "cpu", "avx2": "avx2"}
    return next((kind for feature, kind in kinds.items() if feature in machine.cpu_features), "cpu")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Median, least and greatest of some samples, with the samples."""
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "samples": [float(f"{sample:.5g}") for sample in samples],
    }


class Deadline:
    """The time that a benchmark may take: what is begun after it would be lost.

    Args:
        seconds: from now; None for no end.

    Example:
        >>> Deadline(None).left(), Deadline(0).passed("last case", results := {}), results
        last case: not run: no time left
        (inf, True, {'not_run_for_time': ['last case']})
    """

    def __init__(self, seconds: float | None):
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return max(0.0, self._end - time.monotonic())

    def share(self, parts: int) -> float | None:
        """Seconds for the next of so many parts: twice an even share, all for the last; None where there is no end."""
        left = self.left()
        return None if math.isinf(left) else left if parts == 1 else min(left, 2 * left / parts)

    def passed(self, name: str, results: dict[str, Any]) -> bool:
        """Whether `name` must not be begun; noted in the results then."""
        if self.left() > 0:
            return False
        results.setdefault("not_run_for_time", []).append(name)
        print(f"{name}: not run: no time left", flush=True)
        return True


class Stolen:
    """How much of the processors' time a hypervisor gave to other machines meanwhile.

    with Stolen() as stolen:
        work()
    stolen.share  # 0.0 where nobody takes any, or nobody says so
    """

    share = 0.0

    def __enter__(self) -> "Stolen":
        self._began, self._before = time.perf_counter(), self._seconds()
        return self

    def __exit__(self, *_: object) -> None:
        wall = time.perf_counter() - self._began
        self.share = (self._seconds() - self._before) / (wall * (psutil.cpu_count() or 1))

    @staticmethod
    def _seconds() -> float:
        return getattr(psutil.cpu_times(), "steal", 0.0)  # of Linux alone


def watched_step(replanner: Any, number: int, microbatches: Sequence[Any], lr: float) -> Any:
    """A step as `training.run.Run` takes it where it watches every one, free blocks returned every ten steps.

    Args:
        re-plan: watches the executor, see `training.hooks.adaptive_replanner.AdaptiveReplanner`.
        number: of the step, counted from 1.
        microbatches: as `training.executor.standard.Executor.step` takes them.
        lr: learning rate.
    """
    from tilewright.data.batches.microbatches import row_length
    from tilewright.memory.tracking.malloc import trim_malloc
    from tilewright.training.executor.step_transaction import run_with_retries
    from tilewright.training.hooks.step_hook import Step

    step = Step(number, microbatches, lr, row_length(microbatches), 0.0, False, None, None)  # nothing is recorded
    replanner.before_step(step)
    result = run_with_retries(
        partial(replanner.executor.step, microbatches, lr), partial(replanner.reduce_memory, number)
    )
    replanner.after_step(step, result)
    if number % 10 == 0:
        trim_malloc()
    return result


def parser_of(
    about: str | None,
    cases: Collection[str] = (),
    *,
    tiny: bool = False,
    seconds: bool = False,
    **settings: float | str,
) -> argparse.ArgumentParser:
    """The parser of a program, also of one without settings: `--help` must tell of it and measure nothing.

    Args:
        about: the program's docstring.
        cases: names of what it measures; `parse_args().cases` has those that the command line names, all if none.
        tiny: it has a small form, whose numbers mean nothing.
        seconds: it stops by a time, see `Deadline`.
        settings: numbers and words with their defaults: `steps=20` is `--steps`.

    Example:
        >>> parser_of("Speed of a step.", tiny=True, steps=20).parse_args(["--steps", "5"])
        Namespace(steps=5, tiny=False)
        >>> parser_of("Speed of a step.", ["small", "large"]).parse_args(["small"]).cases
        ['small']
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(cases)

    def known(name: str) -> str:  # not argparse's `choices`: Python 3.11 refuses a list of them as the default
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        return name

    if names:
        parser.add_argument("cases", nargs="*", type=known, default=names, help=", ".join(names) + "; all by default")
    for name, default in settings.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help="%(default)s by default")
    if tiny:
        parser.add_argument("--tiny", action="store_true", help="a small size, also on a CPU; its numbers mean nothing")
    if seconds:
        parser.add_argument("--seconds", type=float, help="nothing is begun after that")
    return parser


def arguments_for_card(parser: argparse.ArgumentParser, *, interprets: bool = False) -> argparse.Namespace:
    """The arguments of a program that needs a CUDA device, unless it is asked for its small form.

    Args:
        parser: from `parser_of`, with `tiny`.
        interprets: without a device its kernels run in Triton's interpreter.

    Raises:
        SystemExit: no device, and not `--tiny`.
    """
    import torch

    args = parser.parse_args()
    if not torch.cuda.is_available():
        if not args.tiny:
            name = _module(Path(sys.argv[0]))
            raise SystemExit(f"{name}: no CUDA device here; --tiny runs a small size on a CPU")
        if interprets:
            os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    return args


def _module(path: Path) -> str:
    """The name of a program of this folder, as `python -m` takes it."""
    inside = path.resolve().with_suffix("")
    inside = inside.relative_to(RESULTS.parent) if inside.is_relative_to(RESULTS.parent) else Path(path.stem)
    return ".".join(("benchmarks", *inside.parts))


def write_result(name: str, claim: str, results: dict[str, Any], arguments: Sequence[str] | None = None) -> Path:
    """Write `results/<name>.json` (under $OUT where that is set) and say where it is.

    `arguments` of the command that gives the same: those of the command line, where none are given.
    """
    folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {
        "claim": claim,
        "command": "python -m "
        + " ".join([_module(Path(sys.argv[0])), *map(_anywhere, sys.argv[1:] if arguments is None else arguments)]),
        "commit": current_commit(),
        "date": datetime.date.today().isoformat(),
        "machine": machine_facts(),
        "results": results,
    }
    new = path.with_suffix(".new")  # a process may be ended here, and what it had written before must stay
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)
    print(f"wrote {path.name}")
    return path


def _anywhere(argument: str) -> str:
    """An argument without the folders of this machine.

    Example:
        >>> _anywhere("--steps"), _anywhere("runs/default"), _anywhere(f"{Path.cwd()}/runs")
        ('--steps', 'runs/default', 'FOLDER')
    """
    return "FOLDER" if Path(argument).is_absolute() else argument


def restart_tuned() -> None:
    """Start the program again in the environment that `tilewright train` makes for itself: torch, which has read its
    settings by now, reads them at its import."""
    from tilewright.core.env import tune_cpu_runtime

    if "GOMP_SPINCOUNT" not in os.environ:
        tune_cpu_runtime()
        os.execv(sys.executable, [sys.executable, "-m", _module(Path(sys.argv[0])), *sys.argv[1:]])


def current_commit() -> str:
    """Of the sources, or "unknown"."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def with_section(text: str, name: str, lines: Sequence[str], command: str) -> str:
    """A page with what stands between the two marks of a section written again.

    Args:
        name: of the section.
        lines: of it.
        command: that writes it.
    """
    start, end = f"<!-- {name}: made by `{command}` -->", f"<!-- /{name} -->"
    between = f"{re.escape(start)}.*?{re.escape(end)}"
    written, count = re.subn(between, lambda _: "\n".join([start, "", *lines, "", end]), text, flags=re.DOTALL)
    assert count == 1, f"no section {name} between its marks"
    return written


def write_pages(wanted: Mapping[Path, str], check: bool, command: str) -> None:
    """Write pages, or only check them.

    Args:
        wanted: pages and their texts.
        check: write nothing.
        command: that writes them.

    Raises:
        SystemExit: a page is not what is wanted.
    """
    for path, text in wanted.items():
        if check and path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.name} is not up to date: {command}")
        path.write_text(text, encoding="utf-8")
