"""Peak memory of `tilewright data build` over all of its processes, and processor seconds, at two sizes of input.

The text is the installed one and copies of it in other words (`benchmarks.data.data_texts`), so that duplicates grow
with the input; the rules are Gopher's of quality. Each size is built by the command; every quarter of a second the
proportional set sizes of its whole tree are added up (pages that processes share count once). Rows are kept as they
end, and a size that has one is not run again: `python -m benchmarks.data.data_memory --megabytes 200 2000`.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import RESULTS, write_result
from benchmarks.data.data_stages import QUALITY, build_command, stage_seconds, write_toml
from benchmarks.data.data_texts import MB, write_shards
from benchmarks.kept_rows import KeptRows

CLAIM = "memory of a data build does not grow with its input, and stays below 1 GiB"
ROWS = KeptRows(RESULTS / "data_memory_runs.jsonl")
SAMPLE_S = 0.25


def tree_bytes(process: psutil.Process) -> tuple[int, int]:
    """(proportional set size, resident set size) of a process and all below it."""
    pss = rss = 0
    try:
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    for one in tree:
        try:
            info = one.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        pss, rss = pss + info.pss, rss + info.rss
    return pss, rss


def watched(command: list[str], log: Path) -> dict[str, Any]:
    """Run a command; its peak, when that was, its wall and processor seconds, all of its processes together."""
    began, peak, peak_rss, at = time.perf_counter(), 0, 0, 0.0
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        root = psutil.Process(process.pid)
        while True:
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            now, resident = tree_bytes(root)
            peak_rss = max(peak_rss, resident)
            if now > peak:
                peak, at = now, time.perf_counter() - began
            time.sleep(SAMPLE_S)
    if status:
        raise SystemExit(f"the build ended with status {status}: {log.read_text()[-2000:]}")
    process.returncode = 0
    return {
        "peak_bytes": peak,
        "peak_resident_bytes": peak_rss,
        "peak_at_s": at,
        "wall_s": time.perf_counter() - began,
        "processor_s": usage.ru_utime + usage.ru_stime,
    }


def measure(source: Path, megabytes: int, processes: int, folder: Path) -> dict[str, Any]:
    """One size."""
    write_toml(folder / "data.toml", read={"source": str(source)}, rules=QUALITY)
    out = folder / "out"
    row = watched(build_command(folder / "data.toml", out, processes), folder / "log")
    summary = json.loads((out / "dataset.json").read_bytes())["summary"]
    size = sum(path.stat().st_size for path in source.glob("*.jsonl"))
    return {
        "megabytes": megabytes,
        "processes": processes,
        "input_bytes": size,
        **row,
        "mb_per_processor_s": size / MB / row["processor_s"],
        "documents": summary["read"]["documents"]["found"],
        "exact_duplicates": summary["duplicates"],
        "near_duplicates": summary["near_duplicates"],
        "kept_bytes": summary["bytes"],
        "stage_seconds": stage_seconds(out),
    }


def main() -> None:
    """Measure the sizes that have no row yet, and write the result of all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--inputs", type=Path, help="folder that keeps the inputs, one folder a size, for other runs")
    args = parser.parse_args()
    for megabytes in args.megabytes:
        if ROWS.of(megabytes=megabytes, processes=args.processes):
            continue
        with tempfile.TemporaryDirectory(prefix="data-memory-", dir=args.inputs) as name:
            source = (args.inputs or Path(name)).resolve() / f"{megabytes}"
            if not source.exists():
                write_shards(source, megabytes * MB)
            row = measure(source, megabytes, args.processes, Path(name))
        ROWS.add(row)
    by_size = {row["megabytes"]: row for row in ROWS.of(processes=args.processes)}
    sizes = sorted(by_size)
    growth = by_size[sizes[-1]]["peak_bytes"] / by_size[sizes[0]]["peak_bytes"]
    arguments = ["--megabytes", *map(str, sizes)]
    if args.processes != parser.get_default("processes"):
        arguments += ["--processes", str(args.processes)]
    write_result("data_memory", CLAIM, {"rows": [by_size[size] for size in sizes], "growth": growth}, arguments)


if __name__ == "__main__":
    main()
