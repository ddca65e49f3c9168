"""Tiled MLPs on replicas: DDP sees one gradient a weight."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tilewright.memory.chunked_mlp import chunk_mlps


def make_layer():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 12))
    return nn.ModuleDict({"mlp": mlp}).double()


def rows():
    return torch.randn(2, 14, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


class Model(nn.Module):
    """DDP looks at the call of a module."""

    def __init__(self):
        super().__init__()
        self.layer = make_layer()

    def forward(self, x):
        return x + self.layer["mlp"](x)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    plain = Model()
    assert chunk_mlps(plain, 3, print) == ["layer.mlp"]
    model = DistributedDataParallel(plain)
    for _ in range(2):  # buckets are built again after the first
        model.zero_grad()
        model(rows()[rank]).square().mean().backward()
    torch.save({name: p.grad for name, p in plain.named_parameters()}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.dist
def test_replicas_of_ddp_share_one_gradient_a_weight(tmp_path):
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    whole = Model()
    whole(rows()).square().mean().backward()
    for rank in range(2):
        grads = torch.load(tmp_path / f"{rank}.pt")
        for name, param in whole.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)
