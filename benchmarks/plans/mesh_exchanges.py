"""Seconds of steps and of their exchanges, measured on small meshes of processes beside what was simulated of them.

The decoder of `mesh_memory`, wider, over gloo with one thread per rank, on a machine with nothing else to do: shards,
copies, cut matrices, spread experts and stages. A step is simulated before it runs (`planner.simulate.mesh.forecast`),
from the machine's own rates and the speed that as many processes have exchanged bytes at. The bound is what exchanges
take if nothing of them is hidden: a CPU hides nothing. What is measured has waiting for slower ranks in it, and cores
that ranks share; messages between stages are in neither.

python -m benchmarks.plans.mesh_exchanges
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import parser_of, write_result
from benchmarks.plans import mesh_memory
from tilewright.core.config.load import load_recipe
from tilewright.parallel.agree import gather
from tilewright.parallel.launch import launched
from tilewright.parallel.mesh import MeshSizes
from tilewright.training.assemble import build, set_up
from tilewright.training.planning.forecast import forecast_of

CLAIM = "seconds of exchanges of real sharded runs, and of their steps, beside what was simulated: reported, no target"
WARM, TIMED = 2, 7
WIDER = {"model.dim": "512", "model.num_layers": "4", "train.global_batch_size": "4", "precision.mode": "fp32"}
MORE = {
    "2 copies": {"parallel.dp_replicate": "2", "parallel.dp_shard": "1"},
    "2 shards, gradients in FP8": {"parallel.dp_shard": "2", "parallel.grad_sync": "fp8"},
}
CASES = {
    name: mesh_memory.CASES[name]
    for name in ("2 shards", "matrices in 2 parts", "experts on 2 ranks", "2 stages, 1f1b")
} | {name: (2, mesh_memory.DENSE | one) for name, one in MORE.items()}


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


def main() -> None:
    """All cases; the result is written after each."""
    parser_of(__doc__).parse_args()
    from tests.ranks import on_ranks

    results: dict[str, Any] = {"warm_steps": WARM, "timed_steps": TIMED, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        mesh_memory.write_text(Path(folder) / "text")
        for name, (world, settings) in CASES.items():
            results["cases"][name] = found = on_ranks(
                world, measure, settings | WIDER, folder, seconds=mesh_memory.SECONDS
            )[0]
            real, told = found["measured"], found["simulated"] or {}
            print(f"{name}: step {real['step_s']:.3f} s, simulated {told.get('step_s')}; exchanges "
                  f"{real['exchange_s']:.3f} s, bound {told.get('bound_s')}", flush=True)  # fmt: skip
            write_result("mesh_exchanges", CLAIM, results, arguments=())


if __name__ == "__main__":
    main()
