"""Checkpoints of several ranks: written together, read by any number of processes, bit for bit."""

import numpy as np
import pytest

from tests.ranks import on_ranks
from tests.training.sharded import loaded, saved
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
