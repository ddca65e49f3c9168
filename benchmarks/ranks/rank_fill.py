"""Memory that a rank needs beside its shards as a model is made: it draws, or reads, the rows of its parts alone.

A decoder whose embedding is most of it is made on the meta device and filled on each rank over gloo, first weights
drawn and those of a Hugging Face folder read. The peak of the process's own memory in between (RssAnon, read every
two milliseconds), less the bytes of its parts, is what the rank needed beside them; a whole embedding would be as much
as the largest parameter. Pages of the mapped folder count apart: the system takes them back when it needs them.

python -m benchmarks.ranks.rank_fill --worlds 2 4
"""

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.common import write_result
from tilewright.core import env
from tilewright.core.hardware import detect_machine
from tilewright.models.build import random_values, stored_values
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.kernels import Kernels
from tilewright.parallel.agree import gather
from tilewright.parallel.fill import shard_from_meta
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.shard import Sharding
from tilewright.parallel.world import World, join

CLAIM = "a rank that makes its shards needs less than 16 MiB beside them"
SHAPE = {"dim": 1024, "num_layers": 1, "num_heads": 4, "ffn_dim": 64, "tie_embeddings": True}
VOCAB = 100_000
MIB = 2**20


def model_of(vocab: int, device: str) -> Decoder:
    with torch.device(device):
        return Decoder(DecoderConfig.of(vocab_size=vocab, **SHAPE), Kernels(detect_machine("cpu"), compile=False))


def resident_bytes() -> tuple[int, int]:
    """Memory of this process: its own, and pages of files that it has mapped."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["RssAnon"].split()[0]), 1024 * int(status["RssFile"].split()[0])


class Peaks:
    """The largest of both inside, beyond what was there before."""

    def __enter__(self) -> "Peaks":
        self._before = resident_bytes()
        self.own = self.mapped = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.002):
            own, mapped = resident_bytes()
            self.own, self.mapped = max(self.own, own - self._before[0]), max(self.mapped, mapped - self._before[1])


def fill(world: World, vocab: int, folder: str | None) -> dict[str, Any]:
    """Make one model on this rank; bytes of its parts, bytes beside them at the peak, and seconds."""
    model = model_of(vocab, "meta")
    values = random_values(model, 0) if folder is None else stored_values(model, Path(folder))
    assert world.fsdp_mesh is not None
    gather(world.everyone.handle, None)
    began = time.perf_counter()
    with Peaks() as peaks:
        shard_from_meta(model, model.layers, world.fsdp_mesh, Sharding(), values, torch.device("cpu"))
    seconds = time.perf_counter() - began
    parts = sum(param.to_local().nbytes for param in model.parameters())
    beside = peaks.own - parts
    return {"parts_bytes": parts, "beside_bytes": beside, "mapped_bytes": peaks.mapped, "seconds": seconds}


def _rank(rank: int, size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in local.items()})
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = join(env.ranks(), MeshSizes(dp_shard=size), torch.device("cpu"))
    fill(world, 64, None)  # what is imported and allocated once is no part of it
    ways = {"drawn": None, "read": folder}
    found = {way: gather(world.everyone.handle, fill(world, VOCAB, stored)) for way, stored in ways.items()}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def on_ranks(size: int, folder: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of every rank, drawn and read."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_rank, (size, store.port, folder), nprocs=size)
    return json.loads((Path(folder) / "found.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = model_of(VOCAB, "cpu")
        largest = max(param.nbytes for param in whole.parameters())
        whole.save_hf(Path(folder))
        del whole
        worlds = {}
        for size in options.worlds:
            ways = on_ranks(size, folder)
            worst = max(row["beside_bytes"] for rows in ways.values() for row in rows)
            worlds[str(size)] = {"worst_beside_bytes": worst, "ranks": ways}
            print(f"{size} ranks: {worst / MIB:.1f} MiB beside a rank's parts at most")
    results = {"model": {"vocab_size": VOCAB, **SHAPE}, "largest_parameter_bytes": largest, "worlds": worlds}
    print("wrote", write_result("rank_fill", CLAIM, results).name)


if __name__ == "__main__":
    main()
