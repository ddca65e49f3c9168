"""Replicas on several ranks: together they do the step of one process with all micro-batches."""

import random

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.training.test_step import Telling, Toy, _executor, _rows, _split, told


def _labels(case):
    """Labels by micro-batch, of both ranks: numbers of targets of their own, also none."""
    draw = random.Random(case)
    return [
        [
            [draw.choice([-100, draw.randrange(60)]) for _ in range(draw.randint(1, 5))]
            for _ in range(draw.randint(1, 3))
        ]
        for _ in range(2)
    ]


def _step(rank):
    everyone = {"data": dist.group.WORLD, "everyone": dist.group.WORLD}
    for case in range(40):
        of_ranks = _labels(case)
        found = _executor(Telling(), **everyone).step(told(of_ranks[rank]), 0.3).aux
        want = _executor(Telling()).step(told([row for mine in of_ranks for row in mine]), 0.3).aux
        assert found == pytest.approx(want, rel=1e-6), (case, of_ranks)
    microbatches = _split(_rows(7, seed=8), [1, 4, 2])
    mine = microbatches[:1] if rank == 0 else microbatches[1:]
    model = Toy(dtype=torch.float64)
    result = _executor(model, **everyone).step(mine, 0.3)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return weights, result.loss, result.num_targets, result.num_tokens


@pytest.mark.dist
@pytest.mark.support("accumulation", "copies")
def test_two_ranks_equal_one():
    """Weights, loss and counts; what the model tells in addition, in forty cases."""
    model = Toy(dtype=torch.float64)
    result = _executor(model).step(_split(_rows(7, seed=8), [1, 4, 2]), 0.3)
    for rank, (weights, loss, num_targets, num_tokens) in enumerate(on_ranks(2, _step)):
        assert loss == pytest.approx(result.loss, abs=1e-12)
        assert (num_targets, num_tokens) == (result.num_targets, result.num_tokens)
        for name, tensor in model.state_dict().items():
            worst = (torch.from_numpy(weights[name]) - tensor).abs().max().item()
            assert worst < 1e-14, f"{name} is off by {worst} on rank {rank}"
