"""Replicas on several ranks: together they do the step of one process with all micro-batches."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.training.test_step import Toy, _executor, _rows, _split


def _step(rank):
    microbatches = _split(_rows(7, seed=8), [1, 4, 2])
    mine = microbatches[:1] if rank == 0 else microbatches[1:]
    model = Toy(dtype=torch.float64)
    result = _executor(model, group=dist.group.WORLD).step(mine, 0.3)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return weights, result.loss, result.num_targets, result.num_tokens


@pytest.mark.dist
@pytest.mark.support("accumulation", "copies")
def test_two_ranks_equal_one():
    model = Toy(dtype=torch.float64)
    result = _executor(model).step(_split(_rows(7, seed=8), [1, 4, 2]), 0.3)
    for rank, (weights, loss, num_targets, num_tokens) in enumerate(on_ranks(2, _step)):
        assert loss == pytest.approx(result.loss, abs=1e-12)
        assert (num_targets, num_tokens) == (result.num_targets, result.num_tokens)
        for name, tensor in model.state_dict().items():
            worst = (torch.from_numpy(weights[name]) - tensor).abs().max().item()
            assert worst < 1e-14, f"{name} is off by {worst} on rank {rank}"
