"""Seconds of steps and of their exchanges, measured on small meshes of processes beside what was simulated of them.

The decoder of `mesh_memory`, wider, over gloo with one thread per rank, on a machine with nothing else to do: shards,
copies, cut matrices, spread experts and stages. A step is simulated before it runs (`planner.simulate.mesh.forecast`),
from the machine's own rates and the speed that as many processes have exchanged bytes at. The bound is what exchanges
take if nothing of them is hidden: a CPU hides nothing. What is measured has waiting for slower ranks in it, and cores
that ranks share; messages between stages are in neither.

python -m benchmarks.mesh_exchanges
"""

import json
import multiprocessing as mp
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import write_result
from benchmarks.mesh_memory import DENSE, MOE, write_text
from tilewright.core.config.load import load_recipe
from tilewright.parallel.agree import gather
from tilewright.parallel.launch import launched
from tilewright.parallel.mesh import MeshSizes
from tilewright.training.assemble import build, set_up
from tilewright.training.planning.forecast import forecast_of

CLAIM = "seconds of exchanges of real sharded runs, and of their steps, beside what was simulated: reported, no target"
WARM, TIMED = 2, 7
WIDER = {"model.dim": "512", "model.num_layers": "4", "train.global_batch_size": "4", "precision.mode": "fp32"}
CASES: dict[str, tuple[int, dict[str, str]]] = {
    "2 shards": (2, DENSE | WIDER | {"parallel.dp_shard": "2"}),
    "2 copies": (2, DENSE | WIDER | {"parallel.dp_replicate": "2", "parallel.dp_shard": "1"}),
    "2 shards, gradients in FP8": (2, DENSE | WIDER | {"parallel.dp_shard": "2", "parallel.grad_sync": "fp8"}),
    "matrices in 2 parts": (2, DENSE | WIDER | {"parallel.tp": "2", "parallel.dp_shard": "1"}),
    "experts on 2 ranks": (2, MOE | WIDER | {"parallel.dp_shard": "2", "parallel.ep": "2"}),
    "2 stages": (2, DENSE | WIDER | {"parallel.pp": "2"}),
}


def measure(rank: int, settings: dict[str, str], folder: str) -> dict[str, Any]:
    """Medians over steps, on the first rank; a step's seconds are those of the slowest rank."""
    there = {"data.source": f"{folder}/text", "data.cache_dir": f"{folder}/cache", "run.dir": folder}
    loaded = load_recipe("default", settings | there, environ={})
    torch.set_num_threads(1)
    with launched(MeshSizes.of(loaded.recipe.parallel), device="cpu", timeout_s=300) as world:
        setup = set_up(loaded, world=world)
        parts = build(setup, fresh=True)
        steps, waits = [], []
        for step in range(WARM + TIMED):
            parts.modes.enter(step)
            result = parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step))
            told = world.traffic.numbers()
            if step >= WARM:
                steps.append(max(gather(world.everyone.handle, result.seconds)))
                waits.append(told.get("exchange_exposed_s", 0.0) - told.get("exchange_exposed_s.pp", 0.0))
        expected = forecast_of(setup, parts)
        parts.close()
        measured = {"step_s": statistics.median(steps), "exchange_s": statistics.median(waits)}
        return {"measured": measured | {"steps_s": steps}, "simulated": expected.to_json() if expected else None}


def _rank(rank: int, world: int, port: int, folder: str, settings: dict[str, str]) -> None:
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in local.items()})
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = measure(rank, settings, folder)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def on_ranks(world: int, settings: dict[str, str], folder: str) -> dict[str, Any]:
    """What the first of so many ranks has found."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(
        _rank, (world, store.port, folder, settings), nprocs=world, start_method="forkserver"
    )
    return json.loads((Path(folder) / "found.json").read_text())


def main() -> None:
    """All cases; the result is written after each."""
    results: dict[str, Any] = {"warm_steps": WARM, "timed_steps": TIMED, "cases": {}}
    mp.get_context("forkserver").set_forkserver_preload(["tilewright.training.session"])
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder) / "text")
        for name, (world, settings) in CASES.items():
            results["cases"][name] = found = on_ranks(world, settings, folder)
            real, told = found["measured"], found["simulated"] or {}
            print(f"{name}: step {real['step_s']:.3f} s, simulated {told.get('step_s')}; exchanges "
                  f"{real['exchange_s']:.3f} s, bound {told.get('bound_s')}", flush=True)  # fmt: skip
            write_result("mesh_exchanges", CLAIM, results, arguments=())


if __name__ == "__main__":
    main()
