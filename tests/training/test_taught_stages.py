"""A teacher in stages: the run of one process, whatever the schedule, the depths of teacher and student, and whether
its tokens are kept on disk."""

import pytest

from tests.training.test_experts_run import TEACHER, Launches
from tests.training.test_tensor_run import DENSE
from tests.training.tiny import rows

pytestmark = pytest.mark.dist
SETTINGS = DENSE | {"model__num_layers": 4, "train__steps": 3, "optim__schedule": "constant"}
STAGES = {"parallel__pp": 2}
ZBV = STAGES | {"parallel__schedule": "zbv"}
TOLD = ("cross_entropy", "distillation")


@pytest.fixture(scope="module")
def launch(data, tmp_path_factory):
    """With a teacher of three layers, and one of one."""
    launch = Launches(data, tmp_path_factory.mktemp("taught_stages"), SETTINGS)
    thin = {"model__num_layers": 1, "train__steps": 1}
    launch(1, {"teacher": {"model__num_layers": 3, "model__tie_embeddings": "true"}, "thin": thin})
    return launch


def _taught(launch, **more):
    return {name: str(launch.folder / value) for name, value in TEACHER.items()} | more


def _check(launch, name, world, other):
    launch.check_told(name, world, other, TOLD, rel=1e-5)


def _made(folder, name):
    lines = [row["teacher_rows"] for row in rows(folder / name / "metrics.jsonl") if "teacher_rows" in row]
    return sum(line["made"] for line in lines), sum(line["read"] for line in lines)


@pytest.mark.support("teacher", "stages")
def test_it_is_the_run_of_one_process(launch):
    """A teacher of other depth, tied ends; its tokens kept on disk by one process, and by stages of their own; one with
    too few layers."""
    cached, again = (_taught(launch, distill__cache=str(launch.folder / name)) for name in ("cache", "again"))
    launch(1, {"cached_alone": cached})
    thin = {"distill__teacher": str(launch.folder / "thin")}
    launch(2, {"zbv": ZBV | again, "refused": STAGES | thin})
    _check(launch, "zbv", 2, "cached_alone")
    assert _made(launch.folder, "zbv") == _made(launch.folder, "cached_alone")
    for rank in range(2):
        assert "Fewer layers than stages" in launch.found["refused", 2, rank]


@pytest.mark.slow
def test_tokens_are_not_kept_or_read_in_stages(launch):
    cached = _taught(launch, distill__cache=str(launch.folder / "cache"))
    launch(1, {"plain_alone": _taught(launch), "cached_alone": cached})
    launch(2, {"plain": ZBV | _taught(launch), "read": STAGES | cached})
    _check(launch, "plain", 2, "plain_alone")
    _check(launch, "read", 2, "cached_alone")
    made, read = _made(launch.folder, "read")
    assert (made, read) == (0, sum(_made(launch.folder, "cached_alone")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_ways(launch):
    """In shards, in the other schedules, its tokens made in stages and read by one process, and on from there."""
    cached = _taught(launch, distill__cache=str(launch.folder / "made"))
    names = ("1f1b", "interleaved", "interleaved_zero_bubble", "dualpipe_v")
    ways = {name: STAGES | {"parallel__schedule": name} | _taught(launch) for name in names}
    launch(1, {"alone": _taught(launch), "half": _taught(launch, train__steps=2)})
    launch(2, ways | {"made": ZBV | cached, "half": ZBV | _taught(launch)}, seconds=400)
    launch(1, {"read": cached})
    launch(4, {"shards": STAGES | {"parallel__dp_shard": 2} | _taught(launch)}, seconds=300)
    for name in names:
        _check(launch, name, 2, "alone")
    _check(launch, "half", 2, "alone")
    _check(launch, "shards", 4, "alone")
    assert _made(launch.folder, "read")[0] == 0
    _check(launch, "made", 2, "read")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hugging_face(data, tmp_path):
    """A teacher that is a folder, which teaches tilewright's decoder and a model of its own kind."""
    launch = Launches(data, tmp_path, SETTINGS)
    launch(1, {"first": {"checkpoint__export_hf": "true"}})
    folder = tmp_path / "first" / "hf"
    taught = {"distill__teacher": str(folder)}
    student = {"model__kind": "hf", "model__path": str(folder), "model__weights": "random"}
    launch(1, {"alone": taught, "hf_alone": taught | student})
    launch(2, {"stages": ZBV | taught, "hf": STAGES | taught | student}, seconds=400)
    _check(launch, "stages", 2, "alone")
    _check(launch, "hf", 2, "hf_alone")
