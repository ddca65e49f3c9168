"""Bytes that the ranks of sharded runs hold, measured beside their plan: parameters, gradients and optimizer states.

The decoder of `zero_cpu` over gloo, one thread per rank, two steps of three rows on each rank, in every format of the
states, under ZeRO-3, ZeRO-2 and HSDP. A rank's ledger counts the storages that are there when an update begins; its
plan was made before the model was. Both are in the result, and the peak of a rank's process with them; only that of
the first case is one case's, as a process keeps pages of those before.

python -m benchmarks.ranks.rank_memory --worlds 2 4
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.common import write_result
from tilewright.core.config.load import load_recipe
from tilewright.parallel.agree import gather
from tilewright.parallel.launch import launched
from tilewright.parallel.mesh import MeshSizes
from tilewright.training.assemble import build, set_up

CLAIM = "each rank of a sharded run holds within 5 % of the parameters, gradients and states of its plan"
OWNERS = ("parameters", "gradients", "optimizer")
STEPS, ROWS = 2, 3
FORMATS = {
    "AdamW, FP32 moments": {"optim.moments": "fp32"},
    "AdamW, BF16 moments": {"optim.moments": "bf16"},
    "AdamW, 8-bit moments": {},
    "AdamW, 8-bit moments, split24 masters": {"optim.master_weights": "split24"},
    "AdamW, 8-bit moments, stochastic BF16 weights": {"optim.master_weights": "stochastic"},
    "Muon, 8-bit moments": {"optim.kind": "muon"},
}
WAYS = {
    "ZeRO-2": {"parallel.reshard_after_forward": "false"},
    "three micro-batches": {"train.micro_batch_size": "1"},
    "three micro-batches, each reduced": {"train.micro_batch_size": "1", "parallel.reduce_each": "true"},
}
HSDP = {"parallel.dp_replicate": "2", "parallel.dp_shard": "2"}


def cases(world: int) -> dict[str, dict[str, str]]:
    """Settings of each case, by its name."""
    found = {name: dict(settings) for name, settings in FORMATS.items()}
    if world == 4:
        found["HSDP, two copies of two shards, 8-bit moments"] = HSDP
    return found | {f"AdamW, 8-bit moments, {name}": dict(settings) for name, settings in WAYS.items()}


def hold(folder: str, given: dict[str, str]) -> list[dict[str, Any]]:
    """What each rank's plan says and its ledger has counted, on the first rank."""
    world = dist.get_world_size()
    settings = {
        "parallel.dp_shard": str(world), "parallel.dp_replicate": "1", "train.global_batch_size": str(ROWS * world),
        "train.micro_batch_size": str(ROWS), "data.seq_len": "128", "data.cache_dir": f"{folder}/cache",
        "run.dir": f"{folder}/runs", "run.threads": "1", "run.device": "cpu", "memory.plan": "",
    } | given  # fmt: skip
    loaded = load_recipe("zero_cpu", settings, environ={})
    parallel = loaded.recipe.parallel
    with launched(MeshSizes.of(parallel), device="cpu", timeout_s=300) as joined:
        setup = set_up(loaded, world=joined)
        parts = build(setup, fresh=True)
        for step in range(STEPS):
            parts.modes.enter(step)
            parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step))
        counted = parts.memory_tracker.snapshot(parts.model, parts.optimizer)
        plan = setup.plan
        parts.close()
        (share,) = [vars(row) for row in plan.ranks if joined.rank in row.ranks]
        row = {
            "rank": joined.rank,
            "planned": {owner: share[owner] for owner in OWNERS},
            "measured": {owner: counted["phase_owners"]["update"][owner] for owner in OWNERS},
            "planned_peak": plan.peak_bytes,
            "measured_peak": counted["peak_bytes"],
        }
        return gather(joined.everyone.handle, row)


def _rank(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in local.items()})
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = {name: hold(folder, given) for name, given in cases(world).items()}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def on_ranks(world: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of every rank by case, measured on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(_rank, (world, store.port, folder), nprocs=world)
        return json.loads((Path(folder) / "found.json").read_text())


def worst(ranks: list[dict[str, Any]]) -> float:
    """The largest difference of an owner's bytes on a rank, relative to its plan."""
    return max(abs(row["measured"][owner] / row["planned"][owner] - 1) for row in ranks for owner in OWNERS)


def main() -> None:
    """Measure, print the worst of each case, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    results: dict[str, Any] = {"steps": STEPS, "worlds": {}}
    for world in args.worlds:
        found = results["worlds"][world] = {
            name: {"worst": worst(ranks), "ranks": ranks} for name, ranks in on_ranks(world).items()
        }
        for name, case in found.items():
            sums = [sum(row["measured"].values()) for row in case["ranks"]]
            print(
                f"{world} ranks, {name}: {max(sums):,.0f} bytes at most, off by {100 * case['worst']:.3f} %", flush=True
            )
    write_result("rank_memory", CLAIM, results)


if __name__ == "__main__":
    main()
