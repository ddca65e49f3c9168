"""Torch's tensor parallelism under the executor: which groups sum, what is evaluated, what cannot be summed."""

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.models.shapes import make_batch
from tests.parallel.steps import build, groups_of, microbatches, relative, run
from tests.ranks import on_ranks
from tilewright.core import env
from tilewright.core.errors import ConfigError
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.shard import Sharding, in_parts, shard
from tilewright.parallel.world import World, join
from tilewright.training.executor.evaluate import evaluate
from tilewright.training.executor.standard import quantized_weights

COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
MESHES = [MeshSizes(dp_shard=2, tp=2), MeshSizes(pp=2, tp=2), MeshSizes(dp_replicate=2, tp=2)]
TEXTS = {"a": [make_batch(seed=seed) for seed in range(3)]}


def _cut(model, mesh):
    for block in model.blocks:
        styles = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
        named = {name: styles[name.rpartition(".")[2]] for name, _ in block.named_modules() if name.endswith("_proj")}
        parallelize_module(block, mesh, named)


def _steps(rank):
    found = []
    for sizes in MESHES:
        world, model = join(env.ranks(), sizes, torch.device("cpu")), build("gqa")
        _cut(model, world.mesh["tp"])
        if sizes.dp_shard > 1:
            shard(model, model.layers, world.fsdp_mesh, Sharding())
        try:
            seen, result = run(model, world, microbatches(world.data.rank, 2))
        except ConfigError as error:
            found.append(str(error))
            continue
        batches = [batch for data in range(world.data.size) for batch in microbatches(data, 2)]
        want, alone = run(build("gqa"), World.alone(), batches)
        losses = [
            evaluate(each, TEXTS, data=group, fp32=False)["a"].loss
            for each, group in ((model, world.data.handle), (build("gqa"), None))
        ]
        assert result.num_targets == alone.num_targets
        assert in_parts(model)
        assert quantized_weights(model, seen) is None
        errors = [relative(seen.grads[name], grad) for name, grad in want.grads.items()]
        errors += [abs(result.loss / alone.loss - 1), abs(result.grad_norm / alone.grad_norm - 1)]
        found.append(max(*errors, abs(losses[0] / losses[1] - 1)))
    assert groups_of(World.alone()) == {"data": None, "everyone": None}
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_a_step_and_an_evaluation_are_those_of_one_process():
    """Over two shards; and alone, with the same rows on all four ranks. FP32 sums of at most 96 terms in another order:
    1e-6 is 8 eps."""
    results = on_ranks(4, _steps)
    for shards, alone, copies in results:
        assert shards < 1e-6
        assert alone < 1e-6
        assert "not sharded as a whole" in copies
    assert len({str(found[2]) for found in results}) == 1
