"""The mesh of a run: groups by their meaning, decisions taken together, sizes that do not fit."""

import itertools
from dataclasses import fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import on_ranks
from tilewright.core import env
from tilewright.core.errors import ConfigError
from tilewright.parallel.agree import any_of, from_first, gather, sum_over
from tilewright.parallel.mesh import AXES, REST, MeshSizes
from tilewright.parallel.world import Group, World, join

MESHES = [
    MeshSizes(dp_shard=4), MeshSizes(dp_replicate=2, dp_shard=2), MeshSizes(dp_replicate=4),
    MeshSizes(dp_shard=2, tp=2), MeshSizes(dp_replicate=2, tp=2), MeshSizes(pp=2, dp_replicate=2),
    MeshSizes(pp=2, dp_shard=2), MeshSizes(pp=2, tp=2), MeshSizes(tp=4), MeshSizes(dp_shard=4, ep=2),
    MeshSizes(dp_shard=2, tp=2, ep=4),
]  # fmt: skip


LIMIT_S = 77.0


def all_groups(world):
    """Of each meaning and each axis; but for that of work of unknown length."""
    meshes = [mesh for mesh in (world.mesh, world.fsdp_mesh, world.expert_mesh) if mesh is not None]
    groups = [group.handle for group in (world.data, world.model, world.everyone)]
    return [
        group for group in (*groups, *(one for mesh in meshes for one in mesh.get_all_groups())) if group is not None
    ]


def timeout_s(group):
    """For which its collectives wait; there is no public way to read it."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _group(group):
    ranks = [group.rank] if group.handle is None else dist.get_process_group_ranks(group.handle)
    return {"rank": group.rank, "size": group.size, "alone": group.handle is None, "ranks": ranks}


def _groups(rank):
    found = []
    for sizes in MESHES:
        world = join(env.ranks(), sizes, torch.device("cpu"), timedelta(seconds=LIMIT_S))
        total, bits = torch.tensor([rank + 1.0]), torch.tensor([1 << rank])
        sum_over(world.data.handle, [total])
        sum_over(world.model.handle, [bits])
        found.append({
            "world": (world.rank, world.size, world.local_rank, world.local_size, world.is_first),
            **{name: _group(getattr(world, name)) for name in ("data", "model", "everyone")},
            "sums": (total.item(), bits.item()),
            "fsdp": None if world.fsdp_mesh is None else world.fsdp_mesh.mesh.tolist(),
            "axes": {axis: world.mesh[axis].mesh.tolist() for axis in world.mesh.mesh_dim_names},
            "experts": None if world.expert_mesh is None else world.expert_mesh["ep"].mesh.tolist(),
            "timeouts": {timeout_s(group) for group in all_groups(world)},
            "said": (any_of(world.everyone.handle, rank == 1), from_first(world.everyone.handle, f"of {rank}"),
                     gather(world.everyone.handle, rank)),
        })  # fmt: skip
    return found


def _along(sizes, rank, axes):
    """Ranks that differ from this one along these axes alone, by counting through the mesh."""
    places = list(itertools.product(*(range(getattr(sizes, axis)) for axis in AXES)))
    fixed = [number for number, axis in enumerate(AXES) if axis not in axes]
    return [other for other, place in enumerate(places) if all(place[n] == places[rank][n] for n in fixed)]


@pytest.mark.dist
def test_groups_by_meaning():
    for rank, of_rank in enumerate(on_ranks(4, _groups)):
        for sizes, found in zip(MESHES, of_rank, strict=True):
            assert found["world"] == (rank, 4, rank, 4, rank == 0)
            wanted = {"data": _along(sizes, rank, ("dp_replicate", "dp_shard")),
                      "model": _along(sizes, rank, ("pp", "dp_shard", "tp")), "everyone": [0, 1, 2, 3]}  # fmt: skip
            for name, ranks in wanted.items():
                alone, place = len(ranks) == 1, ranks.index(rank)
                there = [place] if alone else ranks
                assert found[name] == {"rank": place, "size": len(ranks), "alone": alone, "ranks": there}, (sizes, name)
            sums = sum(other + 1.0 for other in wanted["data"]), sum(1 << other for other in wanted["model"])
            assert found["sums"] == sums, sizes
            for axis, ranks in found["axes"].items():
                assert ranks == _along(sizes, rank, (axis,)), (sizes, axis)
            shards = _along(sizes, rank, ("dp_shard",))
            rows = [_along(sizes, other, ("dp_shard",)) for other in _along(sizes, rank, ("dp_replicate",))]
            alone = len(shards) == 1 and (sizes.dp_replicate == 1 or sizes.tp == 1)  # copies of what is cut are sharded
            fsdp = None if alone else shards if sizes.dp_replicate == 1 else rows
            assert found["fsdp"] == fsdp, sizes
            assert found["timeouts"] == {LIMIT_S}
            assert found["said"] == (True, "of 0", [0, 1, 2, 3])
            if sizes.ep > 1:
                first = rank // sizes.ep * sizes.ep
                assert found["experts"] == list(range(first, first + sizes.ep)), sizes


def test_one_process_has_no_groups():
    world = World.alone()
    assert (world.everyone, world.data, world.model) == (Group(), Group(), Group())
    assert (world.rank, world.size, world.waiting_group, world.fsdp_mesh) == (0, 1, None, None)
    value = torch.ones(2)
    sum_over(None, [value])
    assert value.tolist() == [1.0, 1.0]
    assert (any_of(None, True), any_of(None, False), from_first(None, 3), gather(None, 3)) == (True, False, 3, [3])


AXIS = st.integers(1, 4)


@given(pp=AXIS, dp_replicate=AXIS, dp_shard=AXIS, tp=AXIS)
def test_sizes_are_filled_by_name(pp, dp_replicate, dp_shard, tp):
    sizes = MeshSizes(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    asked = MeshSizes(pp=pp, dp_replicate=dp_replicate, dp_shard=REST, tp=tp)
    assert sizes.world == pp * dp_replicate * dp_shard * tp
    assert (sizes.data, sizes.model) == (dp_replicate * dp_shard, pp * dp_shard * tp)
    assert asked.fill(sizes.world) == sizes.fill(sizes.world) == sizes
    with pytest.raises(ConfigError, match=f"{sizes.world + 1} processes") as told:
        sizes.fill(sizes.world + 1)
    shown = str(told.value)
    for name in (field.name for field in fields(MeshSizes)):
        assert (f"{name} = {getattr(sizes, name)}" in shown) == (name.startswith("dp") or getattr(sizes, name) > 1)


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({"dp_replicate": 2, "dp_shard": REST}, 3),
        ({"dp_replicate": 2, "dp_shard": 2}, 2),
        ({"dp_shard": 3}, 2),
        ({"dp_replicate": 4, "dp_shard": REST}, 2),
        ({"dp_shard": REST, "tp": 4}, 6),
    ],
)
def test_a_mesh_that_does_not_fit(sizes, world):
    with pytest.raises(ConfigError, match=f"{world} processes"):
        MeshSizes(**sizes).fill(world)


def test_experts_are_a_second_view_of_the_same_ranks():
    sizes = MeshSizes(dp_replicate=2, dp_shard=4, tp=2, ep=4)
    assert sizes.fill(16).experts == {"pp": 1, "dp_replicate": 2, "efsdp": 2, "ep": 4}
    with pytest.raises(ConfigError, match="ep = 3"):
        MeshSizes(dp_shard=4, ep=3).fill(4)


def _fails(rank):
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


@pytest.mark.dist
def test_what_fails_on_a_rank_is_shown():
    with pytest.raises(AssertionError, match=r"rank 1 of 2(.|\n)*only here"):
        on_ranks(2, _fails)
