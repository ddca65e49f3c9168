"""Bytes that ranks of a mesh hold, measured beside those of a search over meshes (`planner.simulate.mesh`).

A small decoder over gloo, one thread per rank, the sixth step (in the first one the loss is compiled, and what the
compiler keeps, 22 MiB, counts as what that forward pass leaves; so does the code of matmuls for each new number of
rows of an expert): shards, copies of shards, stages, spread experts, cut matrices. A rank's ledger counts parameters,
gradients and states when an update begins, and what a forward pass leaves for backward, under stages of one
micro-batch; the same owners of the search are beside them. Experts are planned as evenly used: ranks have as many rows
together as in the plan, so the mean over ranks is beside the worst one.

python -m benchmarks.plans.mesh_memory
python -m benchmarks.plans.mesh_memory --worlds 8
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import parser_of, write_result
from tilewright.core.config.load import load_recipe
from tilewright.core.hardware import detect_machine
from tilewright.core.memory_plan import KIND_OF
from tilewright.parallel.agree import gather
from tilewright.parallel.launch import launched
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.split import Pipeline
from tilewright.planner.machine.gpu_specs import find_published
from tilewright.planner.simulate.mesh.cluster import cluster_of
from tilewright.planner.simulate.mesh.mesh_model import MeshModel
from tilewright.planner.simulate.mesh.mesh_search import MeshSearch
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting
from tilewright.planner.simulate.mesh.rank_memory import rank_memory
from tilewright.planner.simulate.mesh.setting_space import Space
from tilewright.planner.simulate.mesh.setting_step import MeshCosts, MeshRates
from tilewright.training.assemble import build, set_up

CLAIM = (
    "each rank of a mesh holds within 5 % of the parameters, gradients, states and activations that a search over "
    "meshes counts"
)
OWNERS, ACTIVATIONS = ("parameters", "gradients", "optimizer"), "activations"
LEAST = 2**16
"""Bytes: less of an owner is not compared."""
STEPS = 6
"""The last one is measured."""
SECONDS = 1200.0
"""Of a case at most: the first one measures the machine, where that has not been done."""
DENSE = {
    "model.dim": "128", "model.num_layers": "8", "model.num_heads": "4", "model.tie_embeddings": "false",
    "data.seq_len": "256", "data.vocab_size": "512", "data.holdout": "0.2",
    "train.global_batch_size": "16", "train.micro_batch_size": "2",
    "run.threads": "1", "run.device": "cpu", "memory.plan": "", "precision.mode": "bf16_mixed", "train.compile": "off",
    "optim.kind": "adamw", "optim.moments": "fp32",
}  # fmt: skip
MOE = DENSE | {
    "model.num_experts": "8", "model.num_experts_per_token": "2", "model.expert_dim": "256",
    "model.num_dense_layers": "1",
}  # fmt: skip
CASES: dict[str, tuple[int, dict[str, str]]] = {
    "2 shards": (2, DENSE | {"parallel.dp_shard": "2"}),
    "matrices in 2 parts": (2, DENSE | {"parallel.tp": "2", "parallel.dp_shard": "1"}),
    "2 stages, 1f1b": (2, DENSE | {"parallel.pp": "2"}),
    "experts on 2 ranks": (2, MOE | {"parallel.dp_shard": "2", "parallel.ep": "2"}),
    "2 copies of 2 shards": (4, DENSE | {"parallel.dp_replicate": "2", "parallel.dp_shard": "2"}),
    "4 shards, 8-bit moments": (4, DENSE | {"parallel.dp_shard": "4", "optim.moments": "8bit"}),
    "2 stages of 2 shards": (4, DENSE | {"parallel.pp": "2", "parallel.dp_shard": "2"}),
    "2 shards of matrices in 2 parts": (4, DENSE | {"parallel.tp": "2", "parallel.dp_shard": "2"}),
    "2 shards, layers recomputed": (2, DENSE | {"parallel.dp_shard": "2", "train.activation_checkpoint": "full"}),
    "matrices in 2 parts, outputs of matmuls kept": (
        2,
        DENSE | {"parallel.tp": "2", "parallel.dp_shard": "1", "train.activation_checkpoint": "selective"},
    ),
    "8 shards": (8, DENSE | {"parallel.dp_shard": "8"}),
    "2 copies of 4 shards": (8, DENSE | {"parallel.dp_replicate": "2", "parallel.dp_shard": "4"}),
    "2 stages of 2 shards of matrices in 2 parts": (
        8, DENSE | {"parallel.pp": "2", "parallel.tp": "2", "parallel.dp_shard": "2"},
    ),
    "8 shards, experts on 4 ranks": (8, MOE | {"parallel.dp_shard": "8", "parallel.ep": "4"}),
}  # fmt: skip


def hold(rank: int, settings: dict[str, str], folder: str) -> list[dict[str, Any]]:
    """What each rank's ledger has counted."""
    there = {"data.source": f"{folder}/text", "data.cache_dir": f"{folder}/cache", "run.dir": folder}
    loaded = load_recipe("default", settings | there, environ={})
    torch.set_num_threads(1)
    with launched(MeshSizes.of(loaded.recipe.parallel), device="cpu", timeout_s=300) as joined:
        setup = set_up(loaded, world=joined)
        parts = build(setup, fresh=True)
        for step in range(STEPS):
            parts.modes.enter(step)
            parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step))
            counted = parts.memory_tracker.snapshot(parts.model, parts.optimizer)  # of this step alone
        parts.close()
        row = {"rank": joined.rank}
        row |= {"vocab": setup.prepared.vocab_size}
        row |= {owner: counted["phase_owners"]["update"][owner] for owner in OWNERS}
        row |= {ACTIVATIONS: counted["phase_owners"]["forward"][ACTIVATIONS]}
        return gather(joined.everyone.handle, row)


def planned(settings: dict[str, str], world: int, vocab: int) -> list[dict[str, float]]:
    """The same of each rank of a row, from shapes."""
    recipe = load_recipe("default", settings, environ={}).recipe
    parallel, machine = recipe.parallel, detect_machine("cpu")
    sizes = MeshSizes.of(parallel).fill(world)
    model = MeshModel(recipe, vocab, machine, find_published("h100").ceilings())
    rates = MeshRates(model, cluster_of("h100", world, "", []))
    rows = recipe.train.micro_batch_size
    setting = MeshSetting(
        sizes, Pipeline.of(parallel) if sizes.pp > 1 else Pipeline(1), rows,
        recipe.train.global_batch_size // sizes.data // rows, KIND_OF[recipe.train.activation_checkpoint],
        recipe.optim.moments, recipe.optim.master_weights, parallel.reduce_each, parallel.grad_sync,
    )  # fmt: skip
    search = MeshSearch(rates, Space.of(model, world, world), 1e12, 1e12)
    found = []
    costs = MeshCosts(rates, setting)
    for rank, held in zip(search.simulated(costs).memory, costs.held, strict=True):
        one = rank if sizes.pp == 1 else rank_memory(model, setting, held, 1e12)[0]  # of one micro-batch
        kept = max(owners[ACTIVATIONS] for name, owners in one.phases.items() if name.startswith("backward"))
        found.append({owner: rank.phases["update"][owner] for owner in OWNERS} | {ACTIVATIONS: kept})
    return found


def write_text(folder: Path) -> None:
    """As little text as a tokenizer of 512 entries needs."""
    words = "tile scale block layer token matrix sum row column loss step norm weight bias".split()  # noqa: SIM905
    draw = random.Random(3)
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(words, k=400)) + f" {number}.")


def compared(ranks: list[dict[str, Any]], counted: list[dict[str, float]]) -> dict[str, Any]:
    """The worst rank by owner, the mean of activations, and the worst of the bytes that ranks hold all the time."""
    each, off = len(ranks) // len(counted), {}
    for owner in (*OWNERS, ACTIVATIONS):
        pairs = [(row[owner], counted[row["rank"] // each][owner]) for row in ranks]
        off[owner] = max((plan / real - 1 for real, plan in pairs if real > LEAST), key=abs, default=0.0)
    totals = [
        sum(counted[row["rank"] // each][owner] for owner in OWNERS) / sum(row[owner] for owner in OWNERS) - 1
        for row in ranks
    ]
    kept, plan = (
        sum(of(row)[ACTIVATIONS] for row in ranks) for of in (lambda row: row, lambda row: counted[row["rank"] // each])
    )
    found = {"off": off, "mean_activations": plan / kept - 1, "of_all": max(totals, key=abs)}
    return found | {"measured": ranks, "planned": counted}


def main() -> None:
    """The cases of some worlds; the result is written after each, as far as there is time."""
    parser = parser_of(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="others write a result of their own")
    worlds = parser.parse_args().worlds
    name = "mesh_memory" if worlds == [2, 4] else "_".join(("mesh_memory", *map(str, worlds)))
    from tests.ranks import on_ranks

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder) / "text")
        for case, (world, settings) in CASES.items():
            if world not in worlds:
                continue
            ranks = on_ranks(world, hold, settings, folder, seconds=SECONDS)[0]
            results[case] = found = compared(ranks, planned(settings, world, ranks[0]["vocab"]))
            words = {owner: f"{share:+.2%}" for owner, share in found["off"].items()}
            print(f"{case}: {found['of_all']:+.2%} {words}, mean {found['mean_activations']:+.2%}", flush=True)
            write_result(name, CLAIM, results)


if __name__ == "__main__":
    main()
