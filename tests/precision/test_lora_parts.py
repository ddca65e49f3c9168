"""Adapters of models that ranks hold parts of, on one of two ranks alone: nothing here exchanges anything."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tilewright.core.errors import ConfigError
from tilewright.parallel.inside.tensor.parameter_parts import part_along, run_on_parts
from tilewright.precision.lora.lora import adapted_layers, add_lora, merge_lora


@pytest.fixture
def mesh():
    """Of two ranks, this process being the second."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Outer(nn.Module):
    """Calls a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def adapted(dropout=0.0):
    layer = nn.Linear(8, 4, bias=False)
    add_lora(model := Outer(layer), 2, base="keep", dropout=dropout)
    nn.init.normal_(layer.lora_B)
    return model


def test_compiled_code_drops_the_columns_that_one_process_would_and_has_no_break(mesh):
    model, x = adapted(0.5), torch.randn(3, 8)
    torch.manual_seed(0)
    whole = model(x)
    torch.manual_seed(0)
    others = model(torch.cat((x[:, :4], torch.zeros(3, 4)), 1))  # the part of the first rank
    for name in ("weight", "lora_A"):
        setattr(model.layer, name, part_along(mesh, getattr(model.layer, name), 1))
    run_on_parts(model, layers=["layer"])
    model.forward = torch.compile(model.forward, backend="eager")
    counters.clear()
    torch.manual_seed(0)
    torch.testing.assert_close(model(x[:, 4:].contiguous()), whole - others)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_adapters_of_a_model_in_shards_are_not_merged(mesh):
    """FSDP2 would put them back, and lose sums with weights that it has gathered."""
    model = adapted()
    fully_shard(model.layer, mesh=mesh)
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        merge_lora(model)
    (problem,) = caught.value.problems
    assert "1 layers with adapters, under torch's fully_shard" in problem.got
    assert "tilewright merge" in problem.try_
    assert list(adapted_layers(model)) == ["layer"]
    assert all(torch.equal(param.to_local(), before[name]) for name, param in model.named_parameters())
