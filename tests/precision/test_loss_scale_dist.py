"""Ranks that hold shards agree on an overflow that one of them saw."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from tilewright.optim.gradients import found_inf
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    scaler = DynamicScaler(1024.0, window=2)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    history = []
    for bad_rank in (None, 1, None, None, 0, None):
        scaler.scale(torch.zeros(()))
        weight.grad = torch.ones(4)
        if rank == bad_rank:
            weight.grad[2] = float("inf")
        assert bool(found_inf([weight])) == (rank == bad_rank)
        stepped = scaler.step(optimizer, group=dist.group.WORLD)
        history.append((scaler.update(), stepped))
    (Path(folder) / f"rank{rank}").write_text(f"{history} {weight.tolist()}")
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="gloo with a file store")
def test_two_ranks_decide_alike(tmp_path):
    mp.spawn(_rank, (2, str(tmp_path)), nprocs=2)
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in range(2))
    assert first == second
    assert first.startswith("[(1024.0, True), (512.0, False), (512.0, True), (1024.0, True), (512.0, False)")
