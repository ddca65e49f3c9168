"""Replicas on several ranks: together they do the step of one process with all micro-batches."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.training.test_step import Toy, _executor, _rows, _split


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    microbatches = _split(_rows(7, seed=8), [1, 4, 2])
    mine = microbatches[:1] if rank == 0 else microbatches[1:]
    model = Toy(dtype=torch.float64)
    result = _executor(model).step(mine, 0.3)
    torch.save((model.state_dict(), result.loss, result.num_targets, result.num_tokens), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file store")
def test_two_ranks_equal_one(tmp_path):
    mp.spawn(_rank, (2, str(tmp_path)), nprocs=2)
    model = Toy(dtype=torch.float64)
    result = _executor(model).step(_split(_rows(7, seed=8), [1, 4, 2]), 0.3)
    for rank in range(2):
        weights, loss, num_targets, num_tokens = torch.load(tmp_path / f"{rank}.pt")
        assert loss == pytest.approx(result.loss, abs=1e-12)
        assert (num_targets, num_tokens) == (result.num_targets, result.num_tokens)
        for name, tensor in model.state_dict().items():
            worst = (weights[name] - tensor).abs().max().item()
            assert worst < 1e-14, f"{name} is off by {worst} on rank {rank}"
