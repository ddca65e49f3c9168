"""Headlines: memory and step time of a decoder of 209M parameters, ours beside loops that a user has tuned.

The rows are in `benchmarks.rows.headline_rows`: each is a process of its own, and all take steps of the same rows of
tokens in turns, so that every round compares them under the same conditions. Where other programs run too, seconds of
the processor compare better than those of the clock. The memory of a row is the peak of its whole process, libraries
and compiler included (the kernel's high-water mark of the resident set); beside it stand the peak of the steps after
the warm-up, and what the process held once its libraries were loaded. All processes give what they free back to the
system.

contest    steps in turns, first of the eager rows, then of the compiled ones
cap        eager rows in processes whose data segment may not grow beyond --cap bytes: who finishes two steps

python -m benchmarks.runs.headlines [contest cap] [--rounds 5] [--modes eager compiled] [--only peer bits8] [--tiny]
"""

import json
import os
import resource
import subprocess
import time
from argparse import Namespace
from typing import Any

import psutil

from benchmarks.common import machine_kind, parser_of, spread, write_result
from benchmarks.rows.headline_rows import MICRO, PEERS, ROWS, ROWS_OF, SEQ, load_libraries, make_step, why_not
from benchmarks.rows.headline_table import table
from benchmarks.worker import RETURNS_FREED, Turns, TurnTaker, command_of, contest, take_turns
from tilewright.core.env import tune_cpu_runtime
from tilewright.core.units import format_bytes, parse_bytes

CLAIM = (
    "209M parameters: less peak memory than a loop in pure BF16 with activation checkpointing, chunked loss and 8-bit "
    "AdamW, and than that loop with its optimizer in the backward pass; what that costs in time is said beside it"
)
WARMUP, CAPPED_STEPS = 1, 2
TIMES = ("step_s", "processor_s")
"""Wall time, and processor time over all threads: the second one does not count waiting for other programs."""
PAIRS = (
    *(("bits8", other) for other in ("autocast", *PEERS, "standard")),
    *(("bits8_disk", other) for other in ("autocast", *PEERS, "standard")),
    ("standard", "autocast"),
    ("layer_major", "recomputed"),
)
ALL = tuple(dict.fromkeys(name for rows in ROWS_OF.values() for name in rows))


# ---- one row ----


def worker(name: str, args: Namespace) -> None:
    """Warm up, then take a step for each line on stdin; print seconds, bytes and loss of each."""
    from tilewright.memory.tracking.process_memory import HighWaterMark

    if args.cap_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (args.cap_bytes, args.cap_bytes))
    mark = HighWaterMark() if HighWaterMark.why_not() is None else None
    load_libraries(name)
    base = psutil.Process().memory_info().rss
    step, highest = make_step(name, args.modes == ["compiled"], args.tiny), 0

    def turn(count: int) -> dict[str, float]:
        nonlocal highest
        if count == WARMUP and mark is not None:
            highest = mark.peak()
            mark.reset_peak()
        began, began_processor = time.perf_counter(), time.process_time()
        loss = step(count)
        took = {"step_s": time.perf_counter() - began, "processor_s": time.process_time() - began_processor}
        steps = mark.peak() if mark is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peaks = {"peak_bytes": max(highest, steps), "steps_peak_bytes": steps, "base_bytes": base}
        return {"loss": loss} | took | peaks

    take_turns(turn, WARMUP)


def arguments_of(name: str, mode: str, args: Namespace, cap: int = 0) -> list[str]:
    """Of a row's process."""
    return ["--worker", name, "--modes", mode, "--cap-bytes", str(cap), *(["--tiny"] * args.tiny)]


# ---- all rows ----


def compared(mode: str, args: Namespace) -> dict[str, Any]:
    """Steps in turns: seconds, peaks and losses by row, and pairs of rows."""
    names = [name for name in ROWS_OF[mode] if name in args.only]
    results: dict[str, Any] = {name: {"not_measured": reason} for name in names if (reason := why_not(name))}
    takers: dict[str, TurnTaker] = {}
    warm: Turns = {}
    for name in (name for name in names if name not in results):
        environ = os.environ | RETURNS_FREED
        taker = takers[name] = TurnTaker(name, "runs.headlines", *arguments_of(name, mode, args), environ=environ)
        warm[name] = [taker.answer() for _ in range(WARMUP)]
        print(f"{mode} {name}: {json.dumps(warm[name])}", flush=True)

    def after(turns: Turns) -> None:
        print({name: [round(rows[-1][key], 1) for key in TIMES] for name, rows in turns.items()}, flush=True)

    found = {name: warm[name] + rows for name, rows in contest(takers, args.rounds, after).items()}
    for name, rows in found.items():
        results[name] = {
            **{key: spread([row[key] for row in rows[WARMUP:]]) for key in TIMES},
            **{key: rows[-1][key] for key in ("peak_bytes", "steps_peak_bytes", "base_bytes")},
            "losses": [round(row["loss"], 4) for row in rows],
        }
    for one, other in PAIRS:
        if one in found and other in found:
            results[f"{one} against {other}"] = compare(found[one], found[other])
    return results


def compare(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, Any]:
    """Peak, step time (round by round) and losses of one row against another's."""
    pairs = list(zip(one, other, strict=True))
    return {
        "peak_change": one[-1]["peak_bytes"] / other[-1]["peak_bytes"] - 1,
        **{f"{key}_ratio": spread([a[key] / b[key] for a, b in pairs[WARMUP:]]) for key in TIMES},
        "largest_loss_gap": max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs),
    }


def capped(args: Namespace) -> dict[str, Any]:
    """Who finishes a few steps under a hard limit of the data segment; how the others end."""
    results: dict[str, Any] = {"limit_bytes": parse_bytes(args.cap), "steps": CAPPED_STEPS}
    for name in ROWS_OF["eager"]:
        if name not in args.only or why_not(name):
            continue
        command = command_of("runs.headlines", *arguments_of(name, "eager", args, results["limit_bytes"]))
        pipe, environ = subprocess.PIPE, os.environ | RETURNS_FREED
        process = subprocess.Popen(command, text=True, env=environ, stdin=pipe, stdout=pipe, stderr=pipe)
        out, err = process.communicate("go\n" * (CAPPED_STEPS - WARMUP))
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        results[name] = {"finished": process.returncode == 0 and len(rows) == CAPPED_STEPS, "steps": len(rows)}
        if rows:
            results[name]["peak_bytes"] = rows[-1]["peak_bytes"]
        if process.returncode:
            results[name]["error"] = (err.strip().splitlines() or [f"signal {-process.returncode}"])[-1][:200]
        print(f"{name} under {format_bytes(results['limit_bytes'])}: {results[name]}", flush=True)
    return results


def main() -> None:
    """Run the parts asked for, or one row."""
    parser = parser_of(__doc__, tiny=True, rounds=5, cap_bytes=0)
    parser.add_argument("parts", nargs="*", default=["contest", "cap"])
    parser.add_argument("--modes", nargs="*", choices=ROWS_OF, default=list(ROWS_OF))
    parser.add_argument("--cap", default="2GiB")
    parser.add_argument("--only", nargs="*", choices=ALL, default=list(ALL))
    parser.add_argument("--worker", choices=ALL)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args)
        return
    tune_cpu_runtime()
    kind = "tiny" if args.tiny else machine_kind()
    if "contest" in args.parts:
        results: dict[str, Any] = {"tokens_per_step": MICRO * ROWS * SEQ}
        for mode in args.modes:
            results[mode] = compared(mode, args)
            path = write_result(f"headlines_{kind}", CLAIM, results)
            path.with_suffix(".md").write_text("\n".join(table(json.loads(path.read_text()), None)) + "\n")
    if "cap" in args.parts:
        write_result(f"headlines_cap_{kind}", CLAIM, capped(args))


if __name__ == "__main__":
    main()
