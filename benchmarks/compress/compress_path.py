"""The whole path of `compress` for a run: to INT8 within 0.8 % of the loss, to four bits within 2 %, beside the run
itself in the same runtimes and formats, without a cut.

Each path is a compression as the command makes it, with the run for as many more steps as its control; what it reached
is there where it missed its budget too. Sizes are of files, over FP32; speeds are those of one cached token in the
runtime, over the uncut run's in the same format, and mean something on a quiet machine alone. The same command
continues in its folder.

python -m benchmarks.compress.compress_path RUN --work FOLDER [--steps 200] [--tries 3] [--only INDEX]
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine_kind, write_result
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.artefacts import judged
from tilewright.compress.budget.compress_run import Compression
from tilewright.compress.budget.compress_settings import CompressSettings
from tilewright.compress.export.targets import find_targets
from tilewright.compress.export_run import export_run
from tilewright.compress.prove.consumer_process import ConsumerLimits
from tilewright.core.errors import FitError

CLAIM = "a run is 4.5 times smaller in INT8 within 0.8 % of its loss, and 8 times smaller in four bits within 2 %"
PATHS = (("onnx-int8", "0.8%"), ("gguf-q4_0", "2%"))
Row = dict[str, Any]


def of_path(run: Path, work: Path, target: str, budget: str, steps: int, tries: int) -> Row:
    """What a compression reached."""
    settings = CompressSettings.of(budget, target, "ffn,heads", steps=steps, tries=tries, controls="equal")
    limits = ConsumerLimits.of_this_machine(600)
    done = Compression(open_to_export(run), settings, work / f"to-{target}", open_to_export, _say, limits)
    missed = ""
    try:
        done.run()
    except FitError as error:
        missed = error.problems[0].got
    record = done.record
    best = record["recovered"][record["chosen"]]
    kept = ("name", "units", "parameters", "rise_before", "rise", "error", "equal_rise", "equal_error")
    return {
        "budget": budget,
        "missed": missed,
        "parameters": record["parameters"],
        "best": {name: best[name] for name in kept},
        "tried": {name: row["equal_rise"] for name, row in record["recovered"].items()},
        "artefacts": [_short(row, record["fp32_bytes"]["whole"]) for row in _written(record.get("artefacts", ()))],
    }


def uncut(run: Path, work: Path) -> Row:
    """The run itself in both formats."""
    source = open_to_export(run)
    targets = find_targets(",".join(target for target, _ in PATHS))
    record = export_run(source, targets, work / "uncut", limits=ConsumerLimits.of_this_machine(600))
    alone = {"rise": 0.0, "equal_rise": None}
    return {
        row["target"]: _short(row | judged(row, alone, 1.0), record["fp32_bytes"])
        for row in _written(record["artefacts"])
    }


def _written(rows: Sequence[Row]) -> list[Row]:
    """Rows of artefacts that there are."""
    return [row for row in rows if "bytes" in row]


def _short(row: Row, whole: int) -> Row:
    names = (
        "target",
        "state",
        "integers",
        "bytes",
        "rise",
        "equal_rise",
        "inside",
        "reason",
        "cached_token_s",
        "prefill_s",
    )
    return {name: row[name] for name in names if name in row} | {"smaller": whole / row["bytes"]}


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Measure what is missing; write the result where all is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--only", type=int, help="number of a part: 0 the run itself, 1 INT8, 2 four bits")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    parts = [("uncut", lambda: uncut(args.run, args.work))]
    for target, budget in PATHS:
        parts.append((target, lambda t=target, b=budget: of_path(args.run, args.work, t, b, args.steps, args.tries)))
    for number, (name, measure) in enumerate(parts):
        path = args.work / f"{name}.json"
        if not path.is_file() and args.only in (None, number):
            path.write_text(json.dumps(measure(), indent=1) + "\n")
            print(name, path.read_text(), flush=True)
    files = {name: args.work / f"{name}.json" for name, _ in parts}
    if all(path.is_file() for path in files.values()):
        found = {name: json.loads(path.read_text()) for name, path in files.items()}
        write_result(f"compress_path_{machine_kind()}", CLAIM, {"steps": args.steps, "tries": args.tries, **found})


if __name__ == "__main__":
    main()
