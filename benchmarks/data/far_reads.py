"""A dataset behind a slow line that fails now and then: does the consumer wait, and how many bytes are fetched?

python -m benchmarks.data.far_reads

An epoch of text of this installation, a tenth of which fits into the cache, from a file system that answers after
50 ms, sends 20 MB/s and fails one read in 50, to a consumer that takes a step of 8 rows of 256 tokens every 50 ms: less
than a step of the default job takes, so the line has less time. Once with weights in proportion to the rows, and once
with weights that move every 64 steps.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tests.data.remote.servers import serve
from tilewright.core.units import format_bytes
from tilewright.data.batches.stream import Stream
from tilewright.data.common.cache import file_digest
from tilewright.data.dataset.remote.index import INDEX, write_shards
from tilewright.data.dataset.remote.prepared_shards import PreparedShards, Streaming
from tilewright.data.prepare import prepare

CLAIM = (
    "from 50 ms of latency, 20 MB/s and one failure in 50 reads, steps wait for under 1 % of the time, and an epoch "
    "fetches at most 1.1 times its bytes"
)
LINE = {"latency_s": 0.05, "bytes_per_s": 20e6, "fail_every": 50}
ROWS, LENGTH, SHARD_BYTES = 8, 256, 1 << 14


def small_shards(dataset: Path, folder: Path) -> int:
    """The dataset with shards of SHARD_BYTES, in `folder`; bytes of all shards."""
    shutil.copytree(dataset / "tokens", folder / "tokens")
    write_shards(folder / "tokens", folder, SHARD_BYTES)
    content = json.loads((dataset / "dataset.json").read_bytes())
    content["shards"] = [(folder / INDEX).stat().st_size, file_digest(folder / INDEX)]
    (folder / "dataset.json").write_text(json.dumps(content))
    return sum(path.stat().st_size for path in (folder / "shards").glob("*.bin"))


def epoch(name: str, dataset: Path, cache: Path, limit: int, step_s: float, moves: bool, steps: int) -> dict[str, Any]:
    """Waits and bytes of an epoch's steps."""
    address, server = serve(name, dataset, in_memory=True, **LINE)
    streaming = Streaming(window=1, cache_bytes=limit)
    prepared = prepare(address, seq_len=LENGTH, cache_dir=str(cache), streaming=streaming)
    assert isinstance(prepared, PreparedShards)
    whole = sum(prepared.num_rows.values()) // ROWS
    steps, draw, waits, before = steps or whole, random.Random(2), [], server.num_bytes
    with Stream(prepared, seed=1, batch_size=ROWS, micro_batch_size=ROWS, prefetch=2) as stream:
        began = time.perf_counter()
        for number in range(steps):
            if moves and number % 64 == 63:
                stream.move({one: rows * draw.uniform(0.7, 1.4) for one, rows in prepared.num_rows.items()}, "moved")
            stream.next_step()
            waits.append(stream.wait_s)
            time.sleep(step_s)
        seconds = time.perf_counter() - began
    prepared.reader.close()
    data = sum(one.size for one in prepared.reader.shards) * steps / whole
    behind = sorted(waits[1:])
    return {
        "steps": steps,
        "seconds": seconds,
        "first_step_waited_s": waits[0],
        "waited_s": sum(waits[1:]),
        "wait_share": sum(waits[1:]) / seconds,
        "longest_wait_s": behind[-1],
        "steps_that_waited_over_1_percent": sum(one > step_s / 100 for one in behind),
        "reads": len(server.reads),
        "fetched_bytes": server.num_bytes - before,
        "fetched_to_data": (server.num_bytes - before) / data,
        "blank_rows": sum(prepared.blank_rows.values()),
    }


def main() -> None:
    """Read, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, help="as `tilewright data build mixing_data` makes it; else made")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=0, help="fewer than an epoch's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.dataset is None:
            args.dataset = folder / "mixing_data"
            build = [sys.executable, "-m", "tilewright", "data", "build", "mixing_data", "--out", str(args.dataset)]
            subprocess.run(build, check=True)
        (folder / "small").mkdir()
        size = small_shards(args.dataset, folder / "small")
        results: dict[str, Any] = {"data": format_bytes(size), "cache": format_bytes(size // 10), "step_s": args.step_s}
        for kind in ("fixed", "moving"):
            found = epoch(kind, folder / "small", folder / kind, size // 10, args.step_s, kind == "moving", args.steps)
            results[f"{kind} weights"] = found
            print(json.dumps({kind: found}, indent=1), flush=True)
    write_result("far_reads", CLAIM, results)


if __name__ == "__main__":
    main()
