"""Generators of ranks in a checkpoint, without processes: what each of them draws next, on the mesh that saved or on
another."""

import random

import pytest
import torch

from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.world import Group, World
from tilewright.precision.snapshot import host_states
from tilewright.training.checkpoint.random_generators import (
    draw_apart,
    generator_tensors,
    seed_all,
    set_generators,
    stored_generators,
)


def _worlds(**axes):
    sizes = MeshSizes(**axes)
    for rank in range(sizes.world):
        data = rank // sizes.tp % sizes.data
        yield World(Group(rank, sizes.world), data=Group(data, sizes.data), sizes=sizes)


def _next():
    return torch.rand(3).tolist(), random.random()


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.get_rng_state(), random.getstate()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])


def _saved(draws, **axes):
    """A checkpoint after so many draws of each rank, and what each would draw next."""
    stored, after, host = {}, [], {}
    for world in _worlds(**axes):
        seed_all(3)
        draw_apart(world)
        for _ in range(draws(world)):
            _next()
        own = generator_tensors(world)
        same = own.keys() & stored.keys()
        assert all(torch.equal(own[name], stored[name]) for name in same), "of a name that two ranks have"
        stored |= own
        if world.is_first:
            host = host_states()
        after.append(_next())
    return stored, host, after


def _restored(stored, host, **axes):
    found = []
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    for world in _worlds(**axes):
        seed_all(99)
        taken = {name: stored[name].clone() for name, _ in stored_generators(entries, world)}
        set_generators(taken, host, world)
        found.append(_next())
    return found


MESHES = [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_replicate": 2}]


@pytest.mark.parametrize("axes", [{"dp_shard": 1}, *MESHES, {"pp": 2, "dp_shard": 2, "tp": 2}], ids=str)
def test_each_rank_goes_on_as_it_would_have(axes):
    """Also stages that have drawn another number of times."""
    stored, host, after = _saved(lambda world: 1 + world.data.rank + 2 * (world.part // world.sizes.tp), **axes)
    assert _restored(stored, host, **axes) == after
    reads = [world.data.rank for world in _worlds(**axes)]
    first = [rank for rank, world in enumerate(_worlds(**axes)) if world.part < world.sizes.tp]
    assert len({str(after[rank]) for rank in first}) == len({reads[rank] for rank in first})


@pytest.mark.parametrize(
    "axes", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {"tp": 2, "dp_shard": 2, "pp": 2}]
)
def test_ranks_that_read_the_same_rows_draw_the_same_on_another_mesh(axes):
    """From two data ranks to two with other axes beside them, and back."""
    stored, host, after = _saved(lambda world: 2, dp_shard=2)
    found = _restored(stored, host, **axes)
    assert found == [after[world.data.rank] for world in _worlds(**axes)]
    stored, host, _ = _saved(lambda world: 2, **axes)
    assert _restored(stored, host, dp_shard=2) == after


def test_more_data_ranks_than_were_saved_draw_apart():
    stored, host, after = _saved(lambda world: 2, dp_shard=2)
    found = _restored(stored, host, dp_shard=4)
    assert found[:2] == after
    assert len({str(one) for one in found}) == 4
