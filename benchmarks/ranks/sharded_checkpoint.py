"""Checkpoints of several ranks on one machine: for how long training stands still for a save, and how long it takes to
check and load one with as many ranks, with fewer and with one.

The decoder of `cpu_10m` in FP32 with FP32 moments, in shards (FSDP2) over gloo, one thread per rank. Batches are random
tokens. A save begins after a few steps, is written while training goes on, and has ended before the next one begins. A
stall is that of the slowest rank.

python -m benchmarks.ranks.sharded_checkpoint --ranks 4 --saves 21
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from benchmarks.common import spread, write_result
from tilewright.core import env
from tilewright.core.config.load import load_recipe
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.optim.adam import DeepSeekAdam
from tilewright.parallel.agree import gather
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.world import World, join
from tilewright.training.checkpoint.state import TrainState
from tilewright.training.checkpoint.store import CheckpointStore

CLAIM = "four ranks stand still for at most 50 ms for a checkpoint of the 10M model"
STEPS = 3
"""Between two saves."""
ROWS, TOKENS = 1, 128


class Job:
    """Model, optimizer and batches of one rank."""

    def __init__(self, world: World, seed: int = 0) -> None:
        recipe = load_recipe("cpu_10m", environ={}).recipe
        self.vocab = recipe.data.vocab_size
        model = Decoder(DecoderConfig.from_section(recipe.model, self.vocab))
        init_weights(model, seed)
        if world.fsdp_mesh is not None:
            fully_shard(model, mesh=world.fsdp_mesh)
            register_fsdp_forward_method(model, "loss")
        optimizer = DeepSeekAdam(model.parameters(), lr=1e-4)
        optimizer.init_states()
        self.world, self.model, self.state = world, model, TrainState(model, optimizer, {}, world=world)

    def step(self) -> float:
        """One step on random tokens; its seconds."""
        began = time.perf_counter()
        ids = torch.randint(0, self.vocab, (ROWS, TOKENS))
        labels = torch.cat([ids[:, 1:], torch.full((ROWS, 1), -100)], 1)
        out = self.model.loss({"input_ids": ids, "labels": labels})
        (out.loss_sum / out.count).backward()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began


def measure_saves(world: World, folder: Path, saves: int) -> dict[str, Any]:
    """Stalls and writes, and steps with and without a write beside them."""
    job = Job(world)
    store = CheckpointStore(folder, keep=2, world=world)
    stalls, writes, alone, beside = [], [], [], []
    for number in range(saves + 1):
        alone += [job.step() for _ in range(STEPS)]
        stalls.append(job.state.save(store, number + 1, job.state.meta()))
        beside += [job.step() for _ in range(STEPS)]
        store.wait()
        (record,) = store.finished()
        if record.error is not None:
            raise SystemExit(record.error)
        writes.append(record.write_s)
    store.close()
    stalls = [max(of_ranks) for of_ranks in zip(*gather(world.everyone.handle, stalls), strict=True)]
    return {
        "first_stall_s": stalls[0],  # buffers are made, and the group
        "stall_s": spread(stalls[1:]),
        "write_s": spread(writes[1:]),
        "step_s": spread(alone[STEPS:]),
        "step_beside_a_write_s": spread(beside[STEPS:]),
        "bytes": record.bytes,
    }


def measure_resume(world: World, folder: Path) -> dict[str, Any]:
    """Seconds to find the newest checkpoint and see that it is whole, and to load it; of the slowest rank."""
    job = Job(world, seed=1)
    began = time.perf_counter()
    if world.is_first:
        path, rejected = CheckpointStore(folder).newest_sound()
        if path is None or rejected:
            raise SystemExit(f"no valid checkpoint, or a corrupt one: {rejected}")
    verify_s = time.perf_counter() - began
    if world.everyone.handle is not None:
        dist.barrier()
    began = time.perf_counter()
    job.state.restore(CheckpointStore(folder).paths()[-1])
    load_s = time.perf_counter() - began
    found = gather(world.everyone.handle, (verify_s, load_s))
    return {"verify_s": found[0][0], "load_s": max(load for _, load in found)}


def _rank(rank: int, size: int, port: int, folder: str, work: Callable[..., dict[str, Any]], *args: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    world = World.alone()
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        patience = timedelta(minutes=5)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
        local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in local.items()})
        world = join(env.ranks(), MeshSizes(dp_shard=size), torch.device("cpu"))
    found = work(world, Path(folder) / "checkpoints", *args)
    if world.is_first:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


def on_ranks(size: int, folder: Path, work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What `work(world, checkpoints, *args)` returns on the first of so many ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_rank, (size, store.port, str(folder), work, *args), nprocs=size)
    return json.loads((folder / "found.json").read_text())


def main() -> None:
    """Save and resume, on several ranks and on one, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--saves", type=int, default=21)
    parser.add_argument("--loads", type=int, default=3)
    args = parser.parse_args()
    results: dict[str, Any] = {"ranks": args.ranks, "saves": args.saves, "saved_by": {}, "loaded_by": {}}
    with tempfile.TemporaryDirectory() as name:
        for size in (1, args.ranks):
            base = Path(name) / str(size)
            base.mkdir()
            results["saved_by"][size] = on_ranks(size, base, measure_saves, args.saves)
            print(f"{size} ranks: {results['saved_by'][size]['stall_s']['median'] * 1e3:.1f} ms", flush=True)
        for size in (args.ranks, 2, 1):
            loads = []
            for _ in range(args.loads):
                (base / f"meeting{size}measure_resume").unlink(missing_ok=True)
                loads.append(on_ranks(size, base, measure_resume))
            results["loaded_by"][size] = {key: statistics.median(load[key] for load in loads) for key in loads[0]}
    print(json.dumps(results, indent=1))
    write_result("sharded_checkpoint", CLAIM, results)


if __name__ == "__main__":
    main()
