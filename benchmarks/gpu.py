"""Everything that needs a GPU, in one go: the GPU tests, then the benchmarks. Writes JSON under $OUT.

python -m benchmarks.gpu
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.common import RESULTS, machine_facts

BENCHMARKS = ("benchmarks.ops", "benchmarks.throughput")


def main() -> None:
    """Run the GPU tests and, whatever they say, the benchmarks; exit with the first failure."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu: no CUDA device here; on a CPU run the benchmarks one by one")
    folder = Path(os.environ.get("OUT", RESULTS))
    runs = [("tests", [sys.executable, "-m", "pytest", "-m", "gpu", "-q"])]
    runs += [(name, [sys.executable, "-m", name]) for name in BENCHMARKS]
    codes = {}
    for name, command in runs:
        print(f"== {name}", flush=True)
        codes[name] = subprocess.run(command, check=False).returncode
    summary = {"machine": machine_facts(), "gpu": torch.cuda.get_device_name(), "exit_codes": codes}
    (folder / "gpu_summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    sys.exit(next((code for code in codes.values() if code), 0))


if __name__ == "__main__":
    main()
