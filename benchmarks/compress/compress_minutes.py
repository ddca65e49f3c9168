"""How long `tilewright compress` took, stage by stage, beside what its `--dry-run` predicts; from the folder it made.

The instruction set is that of this process: give it the environment that the command had.

python -m benchmarks.compress.compress_minutes FOLDER
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.common import machine_kind, parser_of, write_result

CLAIM = "compress of the default run to three targets within 1 % takes at most 60 minutes on two AVX2 cores"


def minutes_of(record: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each stage, and what came of it."""
    best, time = record["recovered"][record["chosen"]], record["time"]
    return {
        "budget": record["settings"]["budget"],
        "steps": record["settings"]["steps"],
        "seconds": sum(time["measured"].values()),
        "stages": time["measured"],
        "predicted": {name: time["predicted"][name] for name in ("least", "most")},
        "verdict": record["verdict"],
        "best": {name: best[name] for name in ("name", "parameters", "rise_before", "rise", "error", "equal_rise")},
        "controls": {name: found["rise"] for name, found in record["controls"].items()},
        "artefacts": [
            {name: one[name] for name in ("target", "bytes", "rise", "equal_rise", "inside")}
            | {"smaller": record["fp32_bytes"]["whole"] / one["bytes"]}
            for one in record["artefacts"]
        ],
    }


def main() -> None:
    """Read the record, and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    record = json.loads((parser.parse_args().folder / "compress.json").read_text(encoding="utf-8"))
    write_result(f"compress_minutes_{machine_kind()}", CLAIM, minutes_of(record))


if __name__ == "__main__":
    main()
