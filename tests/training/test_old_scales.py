"""Checkpoints whose 8-bit moments have scales of the flat tensor are loaded, by one process and by ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.ranks import on_ranks
from tests.training.sharded import joined, whole
from tilewright.formats import quadratic_map
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.states import scales_by_row
from tilewright.training.checkpoint.state import TrainState
from tilewright.training.checkpoint.store import CheckpointStore, stored_tensors


def _state(world) -> TrainState:
    """A matrix whose rows are whole blocks, and one whose blocks would lie across rows."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(256, 7, bias=False), nn.Linear(7, 50, bias=False))
    if world.fsdp_mesh is not None:
        fully_shard(model, mesh=world.fsdp_mesh)
    return TrainState(model, DeepSeekAdam(model.parameters(), moments="8bit"), {}, world=world)


def _flat(tensors, name):
    """A moment in codes and scales of the flat tensor, as they were."""
    codes, scale = tensors[name], tensors[f"{name}_scale"]
    value = quadratic_map.decode(codes, scale).reshape(1, -1)
    signed = codes.dtype == torch.int8
    again, flat = quadratic_map.encode(value, torch.full(value.shape, 127, dtype=torch.int32), signed=signed)
    return {name: again.view(codes.shape), f"{name}_scale": flat.view(-1)}


@pytest.fixture
def old(tmp_path):
    """A checkpoint as older versions wrote it, and the states that it should give."""
    state = _state(joined(1))
    for param in state.model.parameters():
        param.grad = torch.randn_like(param)
    state.optimizer.step()
    tensors = state.tensors()
    wanted = dict(tensors)
    for name in [name for name in tensors if name.endswith(("exp_avg", "exp_avg_sq"))]:
        tensors |= _flat(tensors, name)
        made = scales_by_row({"exp_avg": tensors[name], "exp_avg_scale": tensors[f"{name}_scale"]})
        wanted |= {name: made["exp_avg"], f"{name}_scale": made["exp_avg_scale"]}
    store = CheckpointStore(tmp_path)
    store.save(1, tensors, state.meta(), now=True)
    assert stored_tensors(store.path_of(1))["optimizer.0.weight.exp_avg_scale"][1] == (14,)
    assert stored_tensors(store.path_of(1))["optimizer.1.weight.exp_avg_scale"][1] == (3,)
    return store.path_of(1), {name: t.numpy().tobytes() for name, t in wanted.items() if "rng" not in name}


def _load(rank, path, shard, made_before):
    state = _state(joined(shard))
    if made_before:
        state.optimizer.init_states()
    state.restore(path)
    return whole(state)


def _assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, bits in wanted.items():
        assert found[name].tobytes() == bits, name


@pytest.mark.parametrize("made_before", [True, False])
def test_in_one_process(old, made_before):
    path, wanted = old
    _assert_same(_load(0, path, 1, made_before), wanted)


def _load_twice(rank, path):
    return [_load(rank, path, 3, made_before) for made_before in (True, False)]


@pytest.mark.dist
def test_on_ranks(old):
    path, wanted = old
    for of_rank in on_ranks(3, _load_twice, path):
        for found in of_rank:
            _assert_same(found, wanted)
