"""Tiers: bytes per second to host and disk, and how much of that the computation of a layer hides.

For each tier: rates of single slices (`memory.offload.bandwidth`), then a pass over slices with a computation on each,
in three ways: nothing moves; slices come and go back with prefetch; the same without prefetch. `waited_s` is what the
pass stood still for slices, `hidden` the share of it that prefetch takes away. A disk is met here through the system's
memory.

python -m benchmarks.runs.tiers [--tiny] [--slice-mib 64] [--slices 8] [--compute-s 0.3] [--folder FOLDER]
"""

import json
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine_kind, parser_of, spread, write_result
from tilewright.core.hardware import detect_machine
from tilewright.memory.offload.bandwidth import measure_link
from tilewright.memory.offload.flat_layout import placeholder
from tilewright.memory.offload.pool import OffloadPool

CLAIM = "Slices come and go beside the computation: what a tier costs is what its link cannot do in that time."
ROUNDS = 3


class Work:
    """A computation of about `seconds` on the device."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        size = 4096 if device.type == "cuda" else 512
        self.a = torch.randn(size, size, device=device).bfloat16()
        self.repeats = 1
        self.run()  # warm-up
        self.repeats = 20
        self.repeats = max(1, int(seconds / (self.seconds() / self.repeats)))

    def run(self) -> None:
        for _ in range(self.repeats):
            self.a @ self.a

    def seconds(self) -> float:
        """Wall time of one run."""
        started = time.perf_counter()
        self.run()
        wait(self.device)
        return time.perf_counter() - started


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_pass(pool: OffloadPool | None, num_slices: int, work: Work, ahead: bool) -> tuple[float, float]:
    """Wall time, and the part of it spent waiting, of computing on each slice there and back, as a step does."""
    order = [*range(num_slices), *reversed(range(num_slices))]
    waited = pool.traffic.wait_s if pool is not None else 0.0
    started = time.perf_counter()
    for place, index in enumerate(order):
        if pool is not None:
            pool.fetch(index)
            if ahead and place + 1 < len(order):
                pool.prefetch(order[place + 1])
        work.run()
        if pool is not None:
            pool.release(index, changed=place >= num_slices)
    if pool is not None:
        pool.flush()
    wait(work.device)
    return time.perf_counter() - started, pool.traffic.wait_s - waited if pool is not None else 0.0


def measure_tier(tier: str, device: torch.device, folder: Path, args: Namespace) -> dict[str, Any]:
    """Rates and overlap of one tier."""
    slice_bytes = int(args.slice_mib * 2**20)
    rates = [measure_link(tier, device, folder=folder, slice_bytes=slice_bytes) for _ in range(ROUNDS)]
    found: dict[str, Any] = {}
    for name in ("read", "write", "cached_read", "cached_write"):
        samples = [value / 1e9 for rate in rates if (value := getattr(rate, name)) is not None]
        if samples:
            found[f"{name}_gb_s"] = spread(samples)
    work = Work(device, args.compute_s)
    found["compute_s_a_slice"] = work.seconds()
    # Double buffering itself is the same in both, so that only the order of calls differs.
    with OffloadPool(tier, device, folder=folder, prefetch=1) as pool:
        for index in range(args.slices):
            tensors = {"w": placeholder((slice_bytes,), torch.uint8, device)}
            pool.add(index, tensors, fill=lambda given: given["w"].zero_())
        pool.seal()
        run_pass(pool, args.slices, work, ahead=True)
        passes: dict[str, list[tuple[float, float]]] = {"compute": [], "with_prefetch": [], "without_prefetch": []}
        for _ in range(ROUNDS):
            passes["compute"].append(run_pass(None, args.slices, work, ahead=False))
            passes["with_prefetch"].append(run_pass(pool, args.slices, work, ahead=True))
            passes["without_prefetch"].append(run_pass(pool, args.slices, work, ahead=False))
    for name, times in passes.items():
        found[name] = {
            "wall_s": spread([wall for wall, _ in times]),
            "waited_s": spread([waited for _, waited in times]),
        }
    ahead, behind = (found[name]["waited_s"]["median"] for name in ("with_prefetch", "without_prefetch"))
    found["hidden"] = round(1 - ahead / behind, 3)
    return found


def main() -> None:
    """Measure both tiers, and write the result."""
    parser = parser_of(__doc__, tiny=True, slice_mib=64.0, slices=8, compute_s=0.3)
    parser.add_argument("--folder", help="of the disk tier; by default a temporary one")
    args = parser.parse_args()
    if args.tiny:
        args.slice_mib, args.slices, args.compute_s = 1, 3, 0.01
    device = torch.device(detect_machine().device)
    results: dict[str, Any] = {"device": device.type, "threads": torch.get_num_threads(), "slice_mib": args.slice_mib}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for tier in ("host", "disk"):
            results[tier] = measure_tier(tier, device, Path(folder), args)
            print(tier, json.dumps(results[tier], indent=1), flush=True)
            if not args.tiny:
                write_result(f"tiers_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
