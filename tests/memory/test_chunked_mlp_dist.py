"""Tiled MLPs on replicas: DDP sees one gradient a weight."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import on_ranks
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


def _grads(rank: int) -> dict[str, torch.Tensor]:
    plain = Model()
    assert chunk_mlps(plain, 3, print) == ["layer.mlp"]
    model = DistributedDataParallel(plain)
    for _ in range(2):  # buckets are built again after the first
        model.zero_grad()
        model(rows()[rank]).square().mean().backward()
    return {name: p.grad.numpy() for name, p in plain.named_parameters()}


@pytest.mark.dist
def test_replicas_of_ddp_share_one_gradient_a_weight():
    ranks = on_ranks(2, _grads)
    whole = Model()
    whole(rows()).square().mean().backward()
    for grads in ranks:
        for name, param in whole.named_parameters():
            torch.testing.assert_close(torch.from_numpy(grads[name]), param.grad, rtol=1e-12, atol=1e-14)
