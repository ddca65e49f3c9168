"""Start of the ranks, work of one that all have, facts that must be equal, errors printed once."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import on_ranks, started
from tilewright.core import env
from tilewright.core.env import Ranks, agent_store, meeting_point, of_ranks
from tilewright.core.errors import ConfigError, DataError, HardwareError
from tilewright.parallel import launch
from tilewright.parallel.launch import check_equal, in_turn, launched, on_first, share_gpus, take_gpu
from tilewright.parallel.liveness.rendezvous import Meeting
from tilewright.parallel.mesh import REST, MeshSizes


def _waits(rank):
    with launched(MeshSizes(dp_replicate=2), device="cpu", timeout_s=1.0) as world:
        if world.rank:
            time.sleep(100)
        dist.all_reduce(torch.zeros(1), group=world.data.handle)


@pytest.mark.dist
def test_a_rank_that_waits_too_long_ends():
    """`parallel.timeout_minutes` is what `launched` gets: a second here, against a rank that does not come."""
    with started(2, _waits, group=False) as (ranks, ends):
        assert ends[0].poll(60), "it waits on"
        failed, error = ends[0].recv()
        assert failed
        assert "imed out" in error
        assert ranks[1].is_alive()


def _first(rank):
    done = []
    with launched(MeshSizes(dp_shard=REST), device="cpu", timeout_s=60) as world:
        value = on_first(world, lambda: done.append(1) or {"of": rank})
        turns = in_turn(world, lambda: rank)
        try:
            on_first(world, lambda: _raise(ConfigError("No such thing", got="it", need="another", try_="that")))
        except ConfigError as error:
            told = str(error)
        try:
            in_turn(world, lambda: rank if rank != 2 else _raise(DataError("Only here", got="rank 2")))
        except DataError as error:
            alone = str(error)
    return value, done, turns, told, alone


def _raise(error):
    raise error


@pytest.mark.dist
def test_the_first_does_it_and_all_have_the_result():
    for rank, (value, done, turns, told, alone) in enumerate(on_ranks(3, _first)):
        assert value == {"of": 0}
        assert done == ([1] if rank == 0 else [])
        assert turns == rank
        assert told.startswith("No such thing\n")
        assert "rank 2" in alone


def _refused(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def _launched(sizes, **given):
    with launched(sizes, device="cpu", timeout_s=60, **given) as world:
        return world


def _facts(rank):
    with launched(MeshSizes(dp_shard=REST), device="cpu", timeout_s=60) as world:
        check_equal(world, {"recipe": "same"})
        found = [_refused(lambda: check_equal(world, {"recipe": "same", "version of torch": f"2.{rank}"}))]
    meshes, facts = (MeshSizes(dp_replicate=2), MeshSizes(dp_shard=2)), {"recipe": str(rank)}
    details = {"setting train.steps": "5", "setting parallel.dp_shard": str(2 - rank)}
    found.append(_refused(lambda: _launched(meshes[rank], facts=facts, details=lambda: details)))
    found.append(_refused(lambda: _launched(MeshSizes(dp_replicate=3))))
    assert _launched(meshes[0]).sizes.dp_replicate == 2
    return found


@pytest.mark.dist
def test_what_differs_is_named_and_so_is_a_mesh_before_it_is_made():
    """With two meshes ranks would wait for each other in different calls."""
    first, second = on_ranks(2, _facts)
    assert first == second
    version, mesh, size = first
    assert version.startswith("Ranks differ in their version of torch\n")
    assert "rank 0: 2.0; rank 1: 2.1" in version
    assert mesh.startswith("Ranks differ in their setting parallel.dp_shard\n")
    assert size.startswith("Mesh that does not fit the number of processes")


def taken(monkeypatch, seen, locals_=None):
    """What each rank takes, or the refusal; `seen`: GPUs by rank; `locals_`: what the launcher says of its place."""
    store, found, world = dist.HashStore(), [], len(seen)
    places = list(range(world)) if locals_ is None else locals_
    told = dist.PrefixStore("meeting/1", store)
    for rank, names in enumerate(seen):  # one after the other here, so all have told theirs before
        told.set(f"GPUs/{rank}", json.dumps([places[rank], names]))
    for rank, names in enumerate(seen):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "device_count", lambda names=names: len(names))
            patch.setattr(
                torch.cuda, "get_device_properties", lambda index, names=names: SimpleNamespace(uuid=names[index])
            )
            patch.setattr(torch.cuda, "set_device", lambda index: None)
            try:
                found.append(take_gpu(Ranks(rank, places[rank], world, world), Meeting(store, rank, world, 20)))
            except HardwareError as error:
                found.append(str(error))
    return found


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch):
    both = ["a", "b"]
    assert taken(monkeypatch, [both, both]) == [0, 1]
    assert taken(monkeypatch, [["a"], ["b"]]) == [0, 0], "the launcher shows each its own"
    assert taken(monkeypatch, [both, both, ["c", "d"], ["c", "d"]]) == [0, 1, 0, 1], "some of them to each two"
    assert taken(monkeypatch, [both, ["b", "a"]]) == [0, 0], "its own first"
    assert taken(monkeypatch, [both, both], [0, 0]) == [0, 1], "a launcher that gives no local rank"
    assert taken(monkeypatch, [both, ["a"]]) == [1, 0], "the first leaves it to the one that sees no other"
    assert taken(monkeypatch, [["a"], ["a"], ["b"], ["b"]], [0, 1, 0, 1])[0].startswith("Fewer GPUs"), "of two machines"
    assert taken(monkeypatch, [[], []]) == [None, None], "all on the CPU"


def test_ranks_without_a_gpu_are_named_on_all(monkeypatch):
    for seen, got in (
        ([["a"], ["a"]], "rank 1 sees 1 GPU, which 2 processes share"),
        ([["a", "b"]] * 3, "rank 2 sees 2 GPUs, which 3 processes share"),
        ([["a"], []], "rank 1 sees 0 GPUs"),
    ):
        said = taken(monkeypatch, seen)
        assert len(set(said)) == 1, "the same on all"
        assert "Fewer GPUs than processes" in said[0]
        assert got in said[0]
        assert "--nproc-per-node 0" not in said[0]


@given(st.lists(st.lists(st.sampled_from("abcde"), unique=True), min_size=1, max_size=5), st.data())
def test_as_many_ranks_as_can_have_a_gpu(seen, data):
    """None is taken twice, and no other choice serves more ranks."""
    wanted = data.draw(st.lists(st.integers(0, 4), min_size=len(seen), max_size=len(seen)))
    found = share_gpus(seen, wanted)
    names = [seen[rank][index] for rank, index in enumerate(found) if index is not None]
    assert len(names) == len(set(names))

    def most(rank, left):
        if rank == len(seen):
            return 0
        return max([most(rank + 1, left), *(1 + most(rank + 1, left - {name}) for name in seen[rank] if name in left)])

    assert len(names) == most(0, frozenset("abcde"))


@given(st.permutations(range(6)))
def test_where_all_see_all_each_has_the_one_of_its_local_rank(places):
    assert share_gpus([list("abcdef")] * 6, places) == places


def test_one_process_starts_nothing():
    with launched(MeshSizes(dp_shard=REST), device="cpu", timeout_s=60) as world:
        assert world.size == 1
        assert not dist.is_initialized()
        assert on_first(world, lambda: 5) == in_turn(world, lambda: 5) == 5
    with (
        pytest.raises(ConfigError, match="and 1 processes"),
        launched(MeshSizes(dp_replicate=2), device="cpu", timeout_s=60),
    ):
        pass


def test_torchrun_s_store_is_found_where_it_is_there():
    there = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert agent_store(there) == ("host0", 29500, "0")
    assert agent_store(there | {"TORCHELASTIC_RESTART_COUNT": "2"}) == ("host0", 29500, "2")
    assert agent_store(there | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) is None
    assert agent_store({}) is None
    assert meeting_point(there) == ("host0", 29500)
    with pytest.raises(ConfigError, match="nowhere to meet"):
        meeting_point({"WORLD_SIZE": "2"})
    assert [env.ranks(one).rank for one in of_ranks(3, 29500)] == [0, 1, 2]


def test_groups_of_gpus_are_made_and_not_split(monkeypatch):
    """A mesh splits its groups off a default group that is bound to a device: gloo's part with NCCL's options."""
    asked = {}

    def stop(*args, **named):
        asked.update(named, backend=args[0])
        raise KeyboardInterrupt

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    monkeypatch.setattr(launch, "meet", lambda ranks, timeout_s: Meeting(store, 0, 2, 20))
    monkeypatch.setattr(Meeting, "gather", lambda self, what, value: [value])
    monkeypatch.setattr(launch, "take_gpu", lambda ranks, meeting: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", stop)
    with (
        pytest.raises(KeyboardInterrupt),
        launched(MeshSizes(dp_shard=2), device="auto", timeout_s=20),
    ):
        pass
    assert asked["backend"] == "cpu:gloo,cuda:nccl"
    assert "device_id" not in asked
