"""Checkpoints of several ranks: written together, read by any number of processes, bit for bit."""

import numpy as np
import pytest

from tests.ranks import on_ranks
from tests.training.sharded import joined, loaded, saved, sharded_state
from tilewright.core.errors import CheckpointError
from tilewright.training.checkpoint.store import CheckpointStore, read_meta, stored_tensors

pytestmark = pytest.mark.dist


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(found[name], tensor), f"{name}: {found[name]} instead of {tensor}"


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    """A checkpoint of four shards, and what each rank had and did."""
    folder = tmp_path_factory.mktemp("four")
    return CheckpointStore(folder).path_of(3), on_ranks(4, saved, folder, 4)


def test_four_ranks_write_one_checkpoint(of_four):
    path, ranks = of_four
    files = sorted(file.name for file in path.iterdir())
    assert files == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4)), "manifest.json", "meta.json"]
    assert [path.name for path in path.parent.iterdir()] == ["step_00000003"]
    records = [found["record"] for found in ranks]
    assert {(record.error, record.bytes, record.background) for record in records} == {(None, records[0].bytes, True)}
    assert read_meta(path)["of_rank"] == 0
    names = stored_tensors(path).keys()
    assert ranks[0]["tensors"].keys() < names
    assert {name for name in names if name.startswith("rng.")} == {
        "rng.cpu", *(f"rng.rank{rank}.{kind}" for rank in (1, 2, 3) for kind in ("cpu", "host"))
    }  # fmt: skip


@pytest.mark.parametrize(("shard", "replicate"), [(4, 1), (2, 1), (3, 1), (8, 1), (2, 2)])
def test_it_loads_into_any_mesh(of_four, shard, replicate):
    path, ranks = of_four
    for rank, found in enumerate(on_ranks(shard * replicate, loaded, path, shard, replicate)):
        assert_equal(found["tensors"], ranks[0]["tensors"])
        if (shard, replicate) == (4, 1):  # resumed equals never stopped, on each rank
            assert found["after"] == ranks[rank]["after"]
            assert found["next"] == ranks[rank]["next"]


def test_it_loads_into_one_process(of_four):
    path, ranks = of_four
    found = loaded(0, path, 1)
    assert_equal(found["tensors"], ranks[0]["tensors"])
    assert found["meta"]["of_rank"] == 0


def test_of_one_process_into_ranks(tmp_path):
    """And ranks that the checkpoint does not know draw numbers of their own."""
    wrote = saved(0, tmp_path, 1)
    path = CheckpointStore(tmp_path).path_of(3)
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json", "meta.json"]
    first, *others = on_ranks(3, loaded, path, 3)
    again = on_ranks(3, loaded, path, 3)
    for found in (first, *others):
        assert_equal(found["tensors"], wrote["tensors"])
    assert len({tuple(found["next"]) for found in (first, *others)}) == 3
    assert [found["next"] for found in again] == [found["next"] for found in (first, *others)]


def _wrong_on_one(rank, path):
    if rank == 1:
        path = path.with_name("step_00000099")
    try:
        loaded(rank, path, 2)
    except CheckpointError as error:
        return str(error)
    return None


def test_a_load_that_fails_on_one_rank_fails_on_all(of_four):
    first, second = on_ranks(2, _wrong_on_one, of_four[0])
    assert "step_00000099 is not a checkpoint" in first
    assert first == second


def _states_as_stored(rank, path, shard):
    """The optimizer's states are not there yet, and are made as the checkpoint has them."""
    state, _ = sharded_state(joined(shard), seed=1)
    state.restore(path)
    return {key: type(value).__name__ for key, value in state.optimizer.state[state.model.up.weight].items()}


def test_states_are_cut_as_their_parameters(of_four):
    for kinds in on_ranks(2, _states_as_stored, of_four[0], 2):
        assert kinds == {"step": "Tensor", "exp_avg": "DTensor", "exp_avg_sq": "DTensor"}
