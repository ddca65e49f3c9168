"""A run in stages whose experts are on several ranks is the run of one process; it resumes elsewhere; rows travel in 8
bits as they do without stages."""

import pytest

from tests.training.test_experts_run import MIXED, STOP, Launches, check_same
from tests.training.test_pipeline_run import EXPORT
from tests.training.tiny import rows

pytestmark = pytest.mark.dist
SETTINGS = MIXED | {
    "model__num_layers": 4, "optim__clip_norm": 0.1, "optim__schedule": "constant", "train__steps": 4,
    "train__eval_interval": 2, "checkpoint__interval": 2,
}  # fmt: skip
SPREAD = {"parallel__pp": 2, "parallel__ep": 2}
ZBV = SPREAD | {"parallel__schedule": "zbv"}


@pytest.fixture(scope="module")
def launch(data, tmp_path_factory):
    return Launches(data, tmp_path_factory.mktemp("spread_stages"), SETTINGS)


@pytest.mark.slow
def test_it_is_the_run_of_one_process_and_goes_on_on_one(launch):
    launch(1, {"alone": EXPORT})
    launch(4, {"to_one": ZBV | STOP})
    launch(1, {"to_one": {}})
    assert [launch.found["to_one", world, 0][0] for world in (4, 1)] == [2, 4]
    check_same(launch.folder / "to_one", launch.folder / "alone")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_ways(data, tmp_path):
    """Its folder; from shards without stages; experts of 8-bit rows, against these without stages."""
    launch = Launches(data, tmp_path, SETTINGS)
    launch(1, {"alone": EXPORT, "from_one": STOP})
    fp8 = {"parallel__dispatch": "fp8"}
    in_8_bits = {"fp8": SPREAD | fp8, "fp8_shards": {"parallel__ep": 2} | fp8}
    launch(4, {"stages": SPREAD | EXPORT, "from_one": ZBV} | in_8_bits, seconds=500)
    launch.check("stages", 4, "alone")
    check_same(tmp_path / "from_one", tmp_path / "alone")
    check_same(tmp_path / "fp8", tmp_path / "fp8_shards", bound=1e-3)  # a value that is rounded may go elsewhere
    assert any("sent_bytes.ep.all_to_all.fp8" in row for row in rows(tmp_path / "fp8" / "metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["bits", "fp8", "documents"])
def test_kinds_of_runs(data, tmp_path, kind):
    """Of shards without stages. Where the order of a sum decides what a number is rounded to, they are others too."""
    changes = {
        "bits": {"optim__moments": "8bit"}, "fp8": {"precision__mode": "fp8_tile"},
        "documents": {"data__rows": "documents", "data__seq_len": 48, "parallel__balance": "on"},
    }[kind]  # fmt: skip
    launch = Launches(data, tmp_path, SETTINGS)
    launch(1, {"alone": changes})
    launch(4, {"stages": ZBV | changes}, seconds=400)
    assert not isinstance(launch.found["stages", 4, 0], str), launch.found["stages", 4, 0]
    check_same(tmp_path / "stages", tmp_path / "alone", bound=2e-6 if kind == "documents" else 1e-2)
