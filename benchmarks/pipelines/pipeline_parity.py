"""Gradients of stages against one process: models x meshes x schedules, with micro-batches of other shapes and numbers.

Three steps of each case in FP32 (`tests.parallel.pipeline.ragged`), over gloo: the worst gradient of any tensor, step
and rank, relative to its norm; of Hugging Face models where matrices are cut, beyond what FP32 of one process is off
from FP64: norms of heads cancel out (`beyond_fp32`). What is in the result file already is not run again; `--only 8`
runs the meshes of eight ranks.

    python -m benchmarks.pipelines.pipeline_parity
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.common import RESULTS, write_result
from tests.parallel.pipeline.ragged import TOLERANCE, worst_gradient
from tests.parallel.pipeline.test_parity import SCHEDULES
from tests.ranks import on_ranks

CLAIM = "gradients of every schedule, model and mesh of stages are within 2e-6 of one process, per tensor"
DECODERS = ("gqa", "mla", "gqa_moe", "tied")
FAMILIES = ("llama", "qwen3-tied", "qwen3_moe", "deepseek_v3", "granite")
EVEN = ("gqa_even", "mla_even", "moe_even", "tied_even")
"""The decoders with widths that can be cut."""
MIXTURES = ("gqa_moe", "deepseek", "qwen3_moe", "deepseek_v3")
MESHES: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "pp 2": ((*DECODERS, *FAMILIES), {}),
    "pp 2, dp_shard 2": ((*DECODERS, *FAMILIES), {"shards": 2}),
    "pp 2, dp_shard 2, ep 2": (MIXTURES, {"shards": 2, "ep": 2}),
    "pp 2, tp 2": (FAMILIES, {"tp": 2}),
    "pp 2, dp_shard 2, tp 2": ((*EVEN, *FAMILIES), {"shards": 2, "tp": 2}),
}
"""Models and sizes of each."""
TOGETHER = 7
"""Cases of a launch."""


def ranks_of(sizes: dict[str, int]) -> int:
    """Processes of a mesh of two stages per row."""
    return 2 * sizes.get("shards", 1) * sizes.get("tp", 1)


def cases(only: int) -> Iterator[tuple[str, int, str, str]]:
    """(name, ranks, mesh, what is run)."""
    for mesh, (kinds, sizes) in MESHES.items():
        ranks = ranks_of(sizes)
        for kind in kinds:
            for schedule in SCHEDULES if only in (0, ranks) else ():
                yield f"{mesh}: {kind}, {schedule}", ranks, mesh, f"{kind} {schedule}"


def run(rank: int, mesh: str, wanted: list[str]) -> list[tuple[float, str, float]]:
    """The worst gradient of each case on a rank, see `worst_gradient`."""
    found = []
    for one in wanted:
        kind, schedule = one.split()
        worst, _ = worst_gradient(SCHEDULES[schedule], kind, **MESHES[mesh][1])
        found.append(worst)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, default=0, help="meshes of so many ranks alone; 0: all")
    only = parser.parse_args().only
    path = RESULTS / "pipeline_parity.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    left = [one for one in cases(only) if one[0] not in results]
    while left:
        _, ranks, mesh, _ = left[0]
        now = [one for one in left if one[2] == mesh][:TOGETHER]
        of_ranks = on_ranks(ranks, run, mesh, [what for *_, what in now], seconds=1500)
        for (name, *_), worst in zip(now, zip(*of_ranks, strict=True), strict=True):
            beyond, tensor, error = max(worst)
            results[name] = {"error": error, "beyond_fp32": beyond, "tensor": tensor, "ok": beyond <= TOLERANCE}
            print(f"{name}: {beyond:.2g} ({tensor})")
        write_result("pipeline_parity", CLAIM, results, [])
        left = [one for one in left if one not in now]
    print(f"{sum(not one['ok'] for one in results.values())} of {len(results)} above {TOLERANCE:g}")


if __name__ == "__main__":
    main()
