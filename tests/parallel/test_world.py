"""The mesh of a run: groups by axis, decisions taken together, sizes that do not fit."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tilewright.core import env
from tilewright.core.errors import ConfigError
from tilewright.parallel.agree import any_of, from_first, gather, sum_over
from tilewright.parallel.world import MeshSizes, World, join


def _groups(rank, replicate, shard):
    world = join(env.ranks(), MeshSizes(replicate, shard), torch.device("cpu"))
    found = {"rank": world.rank, "size": world.size, "local": (world.local_rank, world.local_size)}
    for name in ("data_group", "replicate_group", "shard_group"):
        group = getattr(world, name)
        found[name] = None if group is None else dist.get_process_group_ranks(group)
    found["fsdp"] = None if world.fsdp_mesh is None else tuple(world.fsdp_mesh.shape)
    total = torch.tensor([rank + 1.0])
    sum_over(world.shard_group, [total])
    one_sees = any_of(world.data_group, rank == 1)
    return found | {"sum": total.item(), "any": one_sees, "first": from_first(world.data_group, f"of {rank}"),
                    "all": gather(world.data_group, rank)}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(
    ("sizes", "of_last"),
    [
        ((1, 2), {"shard_group": [0, 1], "replicate_group": None, "fsdp": (2,), "sum": 3.0}),
        ((2, 1), {"shard_group": None, "replicate_group": [0, 1], "fsdp": None, "sum": 2.0}),
        ((2, 2), {"shard_group": [2, 3], "replicate_group": [1, 3], "fsdp": (2, 2), "sum": 7.0}),
    ],
)
def test_groups(sizes, of_last):
    world = sizes[0] * sizes[1]
    for rank, found in enumerate(on_ranks(world, _groups, *sizes)):
        assert found["rank"] == rank
        assert found["size"] == world
        assert found["local"] == (rank, world)
        assert found["data_group"] == found["all"] == list(range(world))
        assert found["any"] is True
        assert found["first"] == "of 0"
    assert of_last.items() <= found.items()


def test_one_process_has_no_groups():
    world = World.alone()
    assert (world.data_group, world.replicate_group, world.shard_group, world.fsdp_mesh) == (None,) * 4
    value = torch.ones(2)
    sum_over(None, [value])
    assert value.tolist() == [1.0, 1.0]
    assert (any_of(None, True), any_of(None, False), from_first(None, 3), gather(None, 3)) == (True, False, 3, [3])


@pytest.mark.parametrize(("replicate", "shard", "world"), [(2, -1, 3), (2, 2, 2), (1, 3, 2), (4, -1, 2)])
def test_a_mesh_that_does_not_fit(replicate, shard, world):
    with pytest.raises(ConfigError, match=f"{world} processes"):
        MeshSizes.fill(replicate, shard, world)


def test_what_is_left_is_sharded():
    assert MeshSizes.fill(1, -1, 6) == MeshSizes(1, 6)
    assert MeshSizes.fill(2, -1, 6) == MeshSizes(2, 3)
    assert MeshSizes.fill(1, -1, 1).world == 1


def _fails(rank):
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


@pytest.mark.dist
def test_what_fails_on_a_rank_is_shown():
    with pytest.raises(AssertionError, match=r"rank 1 of 2(.|\n)*only here"):
        on_ranks(2, _fails)
