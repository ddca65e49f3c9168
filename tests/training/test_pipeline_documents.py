"""Whole documents under the schedules that other tests leave out, and resumed with another number of stages: the losses
are those of one process."""

import pytest

from tests.ranks import on_ranks
from tests.training.test_document_run import PIPED, STOP, runs, short  # noqa: F401
from tests.training.tiny import rows

pytestmark = [pytest.mark.dist, pytest.mark.slow]
PLAIN = {"train__eval_interval": 0}
CASES = {
    "gpipe": {"parallel__schedule": "gpipe"},
    "interleaved_zero_bubble": {"parallel__schedule": "interleaved_zero_bubble", "parallel__virtual_stages": 2},
    "interleaved_deferred": {"parallel__schedule": "interleaved_deferred", "parallel__virtual_stages": 2},
    "dualpipe_v": {"parallel__schedule": "dualpipe_v"},
    "zbv": {"parallel__schedule": "zbv"},  # by default in shards, on four ranks
}
REPIPED = {"to four stages": 4, "to one process": 1}


@pytest.fixture(scope="module")
def ran(short, tmp_path_factory):  # noqa: F811
    """The folder of all runs, and what each returned on its first rank."""
    folder, found = tmp_path_factory.mktemp("documents"), {}

    def launch(world, changes):
        found.update(on_ranks(world, runs, str(short), str(folder), changes)[0])

    launch(1, {"alone": PLAIN})
    for name, schedule in CASES.items():
        launch(2, {name: PIPED | PLAIN | schedule})
    launch(2, {name: PIPED | PLAIN | STOP for name in REPIPED})
    for name, stages in REPIPED.items():
        launch(stages, {name: PLAIN | {"parallel__pp": stages}})
    return folder, found


@pytest.mark.parametrize("name", [*CASES, *REPIPED])
def test_losses_are_those_of_one_process(ran, name):
    """Relative 1e-5 after six steps: FP32 sums of a step, in another order, and what Adam makes of them."""
    folder, found = ran
    assert found[name][0] == 6, found[name]
    expected, losses = (
        {row["step"]: row["loss"] for row in rows(folder / run / "metrics.jsonl") if "loss" in row}
        for run in ("alone", name)
    )
    assert losses == pytest.approx(expected, rel=1e-5)
