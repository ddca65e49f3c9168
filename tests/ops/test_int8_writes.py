"""An `Int8Linear` follows what it holds, whatever wrote them: each way equals a layer that is made anew."""

import copy
import random

import pytest
import torch
from torch import nn

from tests.ops.test_int8_linear import HERE, MACHINE
from tilewright.ops import int8_linear
from tilewright.precision.integer.linear import Int8Linear

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))


def layer_of(seed, name):
    torch.manual_seed(seed)
    return Int8Linear.from_linear(nn.Linear(32, 8), MACHINE, name)


def held(layer):
    return layer.qdata, layer.scale, layer.bias


def through_numpy(layer, new):
    for buffer, other in zip(held(layer), held(new), strict=True):
        buffer.numpy()[:] = other.numpy()


def through_data(layer, new):
    for buffer, other in zip(held(layer), held(new), strict=True):
        buffer.data.copy_(other)


def in_inference_mode(layer, new):
    with torch.inference_mode():
        layer.load_state_dict(new.state_dict())


def assigned(layer, new):
    layer.qdata, layer.scale, layer.bias = new.qdata, new.scale, new.bias


def swapped(layer, new):
    """`t.set_`: the same tensor object on other memory."""
    for buffer, other in zip(held(layer), held(new), strict=True):
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


HOLDS = {
    "itself": lambda layer: layer.qdata,
    "data": lambda layer: layer.qdata.data,
    "detached": lambda layer: layer.qdata.detach(),
    "view": lambda layer: layer.qdata[:, ::2].T,
    "numpy": lambda layer: torch.from_numpy(layer.qdata.numpy()),
    "as bytes": lambda layer: layer.qdata.view(torch.uint8),
    "storage": lambda layer: torch.empty(0, dtype=torch.int8).set_(layer.qdata.untyped_storage()),
    "dlpack": lambda layer: torch.from_dlpack(layer.qdata),
    "state dict": lambda layer: layer.state_dict()["qdata"],
    "state dict, variables": lambda layer: layer.state_dict(keep_vars=True)["qdata"],
    "prepared": lambda layer: layer.prepared().qdata_NK,
    "set": lambda layer: [given := layer.qdata.clone(), setattr(layer, "qdata", given)][0],
    "assign": lambda layer: [given := copy.deepcopy(layer.state_dict()), layer.load_state_dict(given, assign=True)][0][
        "qdata"
    ],
    "shared memory": lambda layer: layer.share_memory() and torch.from_numpy(layer.qdata.numpy()),
}


@pytest.mark.parametrize("way", HOLDS)
def test_whoever_holds_the_codes_may_write_at_any_time(way):
    """Between any two calls, however many went before; each equals a copy of the layer, which prepares anew."""
    layer = layer_of(0, "auto")
    layer(X), layer(X)
    memory = HOLDS[way](layer)
    for number in range(4):
        layer(X)
        memory.flatten()[0].item()
        if number % 2:
            memory.data.fill_(number * 3)
        else:
            memory.numpy()[..., -1] = number + 1
        assert torch.equal(layer(X), copy.deepcopy(layer)(X)), f"write {number}"
    if way != "shared memory":  # another process may write there
        del memory
        layer(X), layer(X)
        assert not layer._looked_into, "compared in each call though nobody can write"


def test_random_holders_and_writes(monkeypatch):
    """What is held, written and dropped in any order is followed; bytes are read only while somebody could write."""
    draw = random.Random(0)
    layer, holders, reads = layer_of(0, "auto"), [], []
    read = int8_linear.fingerprint
    monkeypatch.setattr(int8_linear, "fingerprint", lambda x: reads.append(x.shape) or read(x))
    ways = [way for way in HOLDS if way != "shared memory"]
    for _ in range(300):
        action = draw.random()
        if action < 0.3:
            holders.append(HOLDS[draw.choice(ways)](layer))
        elif action < 0.6 and holders:
            holders.pop(draw.randrange(len(holders)))
        elif holders:
            draw.choice(holders).data.add_(draw.randrange(3)).clamp_(0, 100)
        got = layer(X)
        again = copy.deepcopy(layer)(X)
        assert torch.equal(got, again)
        if not holders:
            layer(X)
            reads.clear()
            assert torch.equal(layer(X), again)
            assert not reads, "nobody can have written"


def test_shared_memory_gives_the_same_output():
    layer = layer_of(0, "auto")
    want = layer(X)
    moved = layer.share_memory()
    assert torch.equal(moved(X), want)


def test_functional_call_with_other_buffers():
    layer, new = layer_of(0, "auto"), layer_of(1, "auto")
    want, old = new(X), layer(X)
    assert torch.equal(torch.func.functional_call(layer, dict(new.state_dict()), (X,)), want)
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
