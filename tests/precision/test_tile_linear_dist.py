"""FSDP2 over two ranks against one process: the same gradients from sharded weights."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tilewright.core.errors import ConfigError
from tilewright.formats.quant_error import sqnr_db
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.policy.gemm_formats import Gemms
from tilewright.precision.policy.policy import Policy


class Layer(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def converted_model(keep="qdata"):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    convert(model, Policy("fp8_tile", keep=keep), kernels=Kernels.default())
    return model


def data():
    return torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(1))


def losses_and_weights(model, batch, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        move(model, step)
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def move(model, step):
    """Layers that may move change formats before each step but the first."""
    layers = [module for module in model.modules() if isinstance(module, Float8Linear) and module.keep_value]
    for number, layer in enumerate(layers if step else ()):
        names = ("fp8_tile", "bf16", "fp32")
        layer.set_gemms(Gemms.of(*[names[(step + number + matmul) % 3] for matmul in range(3)]))


def _rank(rank: int, folder: str, keep: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    model = converted_model(keep)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = False
    try:
        QuantizedWeights(model, optimizer)
    except ConfigError:
        refused = True
    losses = losses_and_weights(model, data()[rank])
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}
    executed = [module.executed() for module in model.modules() if isinstance(module, Float8Linear)]
    torch.save((losses, weights, refused, executed), Path(folder) / f"{rank}.pt")


@pytest.mark.dist
@pytest.mark.parametrize("keep", ["qdata", pytest.param("value", marks=pytest.mark.slow)])
def test_two_sharded_ranks_train_as_one_process(tmp_path, keep):
    """With inputs kept as values, layers also move between formats."""
    on_ranks(2, _rank, str(tmp_path), keep)
    model = converted_model(keep)
    losses = losses_and_weights(model, data().flatten(0, 1))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert all(part[2] for part in parts)
    ran = [module.executed() for module in model.modules() if isinstance(module, Float8Linear)]
    assert all(part[3] == ran for part in parts)
    assert ("bf16" in ran[0]["wgrad"]) == (keep == "value")
    for step, loss in enumerate(losses):
        assert (parts[0][0][step] + parts[1][0][step]) / 2 == pytest.approx(float(loss), rel=1e-3)
    before = dict(converted_model().named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(parts[0][1][name], parts[1][1][name])
        # AdamW's first steps are near lr * sign(gradient): the few elements whose gradient is noise differ.
        assert sqnr_db(weight.detach() - before[name], parts[0][1][name] - before[name]) > 15, name
