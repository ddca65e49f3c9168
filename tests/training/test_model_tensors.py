"""`model_tensors` keeps every tensor of a model once, whatever the model's tensors are."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.draws import examples
from tilewright.memory.offload.flat_layout import placeholder
from tilewright.training.checkpoint.checkpoint_state import model_tensors

KINDS = ("plain", "same object", "same memory", "view", "buffer", "same buffer", "empty", "unsaved")


def _model(entries: list[tuple[str, int, tuple[int, int]]]) -> nn.Module:
    """Parameters and buffers, some tied to earlier ones."""
    model, buffers = nn.Module(), []
    for number, (kind, other, shape) in enumerate(entries):
        name = f"t{number:02}"
        params = list(model.named_parameters(remove_duplicate=False))
        earlier = params[other % len(params)][1] if params else None
        if kind == "same object" and earlier is not None:
            model.register_parameter(name, earlier)
        elif kind == "same memory" and earlier is not None:
            model.register_parameter(name, nn.Parameter(earlier.data))
        elif kind == "view" and earlier is not None:
            model.register_buffer(name, earlier.data.reshape(1, 1, -1))
        elif kind == "same buffer" and buffers:
            model.register_buffer(name, buffers[other % len(buffers)])
        elif kind == "buffer":
            buffers.append(torch.randn(shape))
            model.register_buffer(name, buffers[-1])
        elif kind == "unsaved":
            model.register_buffer(name, torch.randn(shape), persistent=False)
        else:
            model.register_parameter(name, nn.Parameter(torch.randn((0, 4) if kind == "empty" else shape)))
    return model


ENTRIES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.sampled_from([(3, 2), (1, 1), (5, 4)])), max_size=12
)


@settings(deadline=None)
@given(ENTRIES)
def test_each_tensor_once(entries):
    """What is kept is filled with one number after the other: then every tensor of the model shows a number, and no
    two that are kept show the same, unless one is the other in another shape."""
    model = _model(entries)
    saved = {f"model.{name}": value for name, value in model.state_dict().items()}
    found = model_tensors(model)
    assert list(found) == [name for name in saved if name in found]
    for number, tensor in enumerate(found.values()):
        assert not tensor.requires_grad
        before = [other.clone() for other in found.values()]
        tensor.fill_(number)
        for place, (old, new) in enumerate(zip(before, found.values(), strict=True)):
            assert place == number or new.shape != tensor.shape or torch.equal(old, new), "kept twice"
    for name, value in saved.items():
        same = [kept for kept, tensor in found.items() if tensor.shape == value.shape and torch.equal(tensor, value)]
        assert same, f"{name} is not kept"
        assert same[0] <= name


def _kept(model: nn.Module) -> list[str]:
    """By the rule in words: the first name of each object."""
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        first.setdefault(id(value), f"model.{name}")
    return sorted(first.values())


def _no_memory(entries, change) -> None:
    """The same model after each parameter was replaced by `change` of it, ties kept."""
    model = _model([entry for entry in entries if entry[0] in ("plain", "same object", "empty")])
    new = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if param not in new:
            new[param] = nn.Parameter(change(param.data))
        setattr(model, name, new[param])
    assert sorted(model_tensors(model)) == _kept(model)


@settings(deadline=None)
@given(ENTRIES)
def test_each_parameter_once_on_the_meta_device(entries):
    _no_memory(entries, lambda value: value.to("meta"))


@settings(deadline=None)
@given(ENTRIES)
def test_each_parameter_once_where_it_is_stored_elsewhere(entries):
    _no_memory(entries, lambda value: placeholder(value.shape, value.dtype, "cpu"))


@pytest.fixture(scope="module")
def mesh():
    """One rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.dist
@examples(30)
@given(ENTRIES)
def test_each_parameter_once_in_shards(mesh, entries):
    _no_memory(entries, lambda value: distribute_tensor(value, mesh, [Shard(0)]))
