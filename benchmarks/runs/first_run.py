"""The first run: `tilewright train` in an empty folder with an empty cache, as a newcomer starts it.

The result says how long training and the whole command took, how many steps fitted into `train.minutes`, the held-out
bits per byte, for this class of CPU. Under another's instruction set the environment says
it: `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`.

python -m benchmarks.runs.first_run [--keep FOLDER]
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Stolen, machine_kind, parser_of, write_result
from benchmarks.run_command import rows, step_rows, train, train_command
from benchmarks.runs.default_job import bits_of

CLAIM = (
    "`tilewright train` in an empty folder trains for at most 5.5 minutes and ends at 1.9 bits per byte or less "
    "(AVX2 alone: 2.3)"
)


def first_run(folder: Path) -> dict[str, Any]:
    """Run the default job with its files and caches in `folder`; what it took and reached."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    began = time.perf_counter()
    train(train_command("default", {}), cwd=folder, env=environment)
    whole_s = time.perf_counter() - began
    [run] = (path for path in (folder / "runs").iterdir() if not path.is_symlink())
    last = rows(run / "metrics.jsonl")[-1]
    return {
        "steps": last["step"],
        "training_s": last["time_s"],
        "whole_s": whole_s,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in step_rows(run)),
        "bits_per_byte": bits_of(run),
    }


def main() -> None:
    """Make the run, and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--keep", type=Path, help="an empty folder for the run, which stays")
    args = parser.parse_args()
    with Stolen() as stolen, tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        found = first_run(folder)
    write_result(f"first_run_{machine_kind()}", CLAIM, found | {"stolen_share": stolen.share})


if __name__ == "__main__":
    main()
