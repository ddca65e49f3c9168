"""An `Int8Linear` follows its buffers, whatever wrote them: each way equals a layer that is made anew."""

import copy

import pytest
import torch
from torch import nn

from tests.ops.test_int8_linear import HERE, MACHINE
from tilewright.precision.integer.linear import Int8Linear

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))


def layer_of(seed, name):
    torch.manual_seed(seed)
    return Int8Linear.from_linear(nn.Linear(32, 8), MACHINE, name)


def through_numpy(layer, new):
    for buffer, other in zip(layer.buffers(), new.buffers(), strict=True):
        buffer.numpy()[:] = other.numpy()


def through_data(layer, new):
    for buffer, other in zip(layer.buffers(), new.buffers(), strict=True):
        buffer.data.copy_(other)


def in_inference_mode(layer, new):
    with torch.inference_mode():
        layer.load_state_dict(new.state_dict())


def assigned(layer, new):
    layer.qdata, layer.scale, layer.bias = new.qdata, new.scale, new.bias


def swapped(layer, new):
    """`t.set_`: the same tensor object on other memory."""
    for buffer, other in zip(layer.buffers(), new.buffers(), strict=True):
        buffer.set_(other)


WRITES = {
    "copy_": lambda layer, new: layer.load_state_dict(new.state_dict()),
    "assign": lambda layer, new: layer.load_state_dict(new.state_dict(), assign=True),
    "attributes": assigned,
    "data": through_data,
    "numpy": through_numpy,
    "inference_mode": in_inference_mode,
    "set_": swapped,
}
ONE_BUFFER = ("qdata", "scale", "bias")


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("name", HERE)
def test_every_write_is_followed(name, way):
    layer, new = layer_of(0, name), layer_of(1, name)
    want, old = new(X), layer(X)
    assert not torch.equal(old, want)
    WRITES[way](layer, copy.deepcopy(new))
    assert torch.equal(layer(X), want)
    layer.prepared()
    assert torch.equal(layer(X), want)


@pytest.mark.parametrize("which", ONE_BUFFER)
@pytest.mark.parametrize("name", HERE)
def test_a_write_of_one_buffer_is_followed(name, which):
    for write in (setattr, lambda layer, which, value: getattr(layer, which).data.copy_(value)):
        layer, new = layer_of(0, name), layer_of(1, name)
        layer(X)
        write(layer, which, getattr(new, which).clone())
        assert torch.equal(layer(X), copy.deepcopy(layer)(X)), "a copy, which prepares anew"


def test_shared_memory_gives_the_same_output():
    layer = layer_of(0, "auto")
    want = layer(X)
    moved = layer.share_memory()
    assert torch.equal(moved(X), want)


def test_functional_call_with_other_buffers():
    layer, new = layer_of(0, "auto"), layer_of(1, "auto")
    want, old = new(X), layer(X)
    assert torch.equal(torch.func.functional_call(layer, dict(new.named_buffers()), (X,)), want)
    assert torch.equal(layer(X), old)


def test_scales_of_another_number_of_rows_are_refused():
    layer = layer_of(0, "auto")
    layer.scale = torch.ones(1, 1)
    with pytest.raises(ValueError, match="need scales"):
        layer(X)


@pytest.mark.slow
@pytest.mark.parametrize("way", WRITES)
def test_compiled_code_follows_writes(way):
    layer, new = layer_of(0, "auto"), layer_of(1, "auto")
    want = new(X)
    compiled = torch.compile(layer, fullgraph=True)
    compiled(X)
    WRITES[way](layer, copy.deepcopy(new))
    assert torch.equal(compiled(X), want)
    layer(X)
    assert torch.equal(compiled(X), want)
