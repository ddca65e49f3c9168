"""Checkpoints of several ranks: written together, read by any number of processes, bit for bit."""

import numpy as np
import pytest

from tests.ranks import on_ranks
from tests.training.sharded import joined, loaded, saved, sharded_state
from tilewright.core.errors import CheckpointError
from tilewright.training.checkpoint.checkpoint_meta import read_meta
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, stored_tensors

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
    assert files == [
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(4)),
        "index.json",
        "manifest.json",
        "meta.json",
    ]
    assert [path.name for path in path.parent.iterdir()] == ["step_00000003"]
    records = [found["record"] for found in ranks]
    assert {(record.error, record.bytes, record.background) for record in records} == {(None, records[0].bytes, True)}
    assert read_meta(path)["of_rank"] == 0
    names = stored_tensors(path).keys()
    assert ranks[0]["tensors"].keys() < names
    assert {name for name in names if name.startswith("rng.")} == {
        "rng.cpu", *(f"rng.rank{rank}.{kind}" for rank in (1, 2, 3) for kind in ("cpu", "host"))
    }  # fmt: skip


def test_ranks_have_the_names_of_one_process(of_four, tmp_path):
    """Also a rank of whose tensors some are empty; and the model is known by the same fingerprint."""
    one = saved(0, tmp_path, 1)
    for rank, found in enumerate(of_four[1]):
        assert found["fingerprint"] == one["fingerprint"]
        own = [name for name in found["names"] if name.startswith("rng.")]
        assert own == (["rng.cpu"] if rank == 0 else [f"rng.rank{rank}.cpu", f"rng.rank{rank}.host"])
        assert found["names"][: -len(own)] == one["names"][:-1]
    assert "model.embed.weight" in one["names"]
    assert "model.head.weight" not in one["names"]


@pytest.mark.parametrize(
    ("shard", "replicate"),
    [(4, 1), (3, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (2, 1), (8, 1)))],
)
@pytest.mark.support("reshard", "shards", "hsdp")
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


def _loaded_in_every_way(rank, path, of_four):
    """One start of the ranks for several questions."""
    state, _ = sharded_state(joined(2), seed=1)
    state.restore(of_four)  # the optimizer's states are not there yet, and are made as the checkpoint has them
    kinds = {key: type(value).__name__ for key, value in state.optimizer.state[state.model.up.weight].items()}
    try:
        state.restore(of_four if rank == 0 else of_four.with_name("step_00000099"))
        said = None
    except CheckpointError as error:
        said = str(error)
    return {"kinds": kinds, "said": said, "once": loaded(rank, path, 2), "again": loaded(rank, path, 2)}


def test_of_one_process_into_ranks(of_four, tmp_path):
    """States are cut as their parameters; a load that fails on one rank fails on all; and ranks that the checkpoint
    does not know draw numbers of their own, the same ones each time."""
    wrote = saved(0, tmp_path, 1)
    path = CheckpointStore(tmp_path).path_of(3)
    assert sorted(file.name for file in path.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "index.json",
        "manifest.json",
        "meta.json",
    ]
    first, second = on_ranks(2, _loaded_in_every_way, path, of_four[0])
    for found in (first, second):
        assert found["kinds"] == {"step": "Tensor", "exp_avg": "DTensor", "exp_avg_sq": "DTensor"}
        assert "step_00000099 is not a checkpoint" in found["said"]
        assert_equal(found["once"]["tensors"], wrote["tensors"])
        assert found["once"]["next"] == found["again"]["next"]
    assert first["said"] == second["said"]
    assert first["once"]["next"] != second["once"]["next"]
