"""Preferences (DPO) in stages: losses, norms, margins and the weights are those of one process."""

import pytest

from tests.training.test_experts_run import PAIRS, Launches, write_pairs
from tests.training.test_tensor_run import DENSE

pytestmark = pytest.mark.dist
SETTINGS = DENSE | PAIRS | {"model__num_layers": 4, "train__global_batch_size": 8, "train__micro_batch_size": 2}
STAGES = {"parallel__pp": 2}
ZBV = STAGES | {"parallel__schedule": "zbv", "model__tie_embeddings": "true"}
TOLD = ("margin", "accuracy")


def _check(launch, name, world, other):
    launch.check_told(name, world, other, TOLD, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def launch(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs_in_stages")
    write_pairs(folder / "pairs.jsonl")
    return Launches(data, folder, SETTINGS | {"data__source": str(folder / "pairs.jsonl")})


@pytest.mark.support("pairs", "stages")
def test_it_is_the_run_of_one_process(launch):
    launch(1, {"tied_alone": {"model__tie_embeddings": "true"}})
    launch(2, {"zbv": ZBV})
    _check(launch, "zbv", 2, "tied_alone")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_in_shards_and_cut(launch):
    launch(1, {"alone": {}})
    launch(2, {"1f1b": STAGES})
    _check(launch, "1f1b", 2, "alone")
    launch(4, {"shards": STAGES | {"parallel__dp_shard": 2}, "cut": STAGES | {"parallel__tp": 2}}, seconds=250)
    _check(launch, "shards", 4, "alone")
    _check(launch, "cut", 4, "alone")
