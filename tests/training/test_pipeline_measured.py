"""A run over stages measures its passes: what it writes, its report's chart, and the state it goes on from."""

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.ranks import on_ranks
from tests.training.test_pipeline_run import HALF, RUN, runs
from tilewright.parallel.pipeline.balance.measured_step import FILE, MeasuredStep
from tilewright.parallel.pipeline.balance.replay import CAUSES
from tilewright.report.page import write_report
from tilewright.training.checkpoint.checkpoint_meta import read_meta

pytestmark = pytest.mark.dist
CASES = {
    "plain": {"parallel__pp": 2},
    "late": {"parallel__pp": 2, "parallel__schedule": "zbv"},
}
STEPS = 4
NAMES = [pytest.param("plain", marks=pytest.mark.slow), "late"]
ROWS, MICRO = RUN["train__global_batch_size"], RUN["train__micro_batch_size"]


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    """The folder of a run by its case, made when the first test asks for it."""
    folder = tmp_path_factory.mktemp("measured")

    def folder_of(name):
        if not (folder / name).exists():
            found = on_ranks(2, runs, str(data), str(folder), {name: HALF | CASES[name] | {"train__steps": STEPS}})
            assert all(of_rank[name][0] == STEPS for of_rank in found), found
        return folder / name

    return folder_of


def measured(folder: Path) -> dict:
    return json.loads((folder / FILE).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_each_pass_is_there_once_and_in_an_order_that_can_be(ran, name):
    found = measured(ran(name))
    kinds = {"forward", "backward"} if name == "plain" else {"forward", "backward of inputs", "backward of weights"}
    stages = 2 if name == "plain" else 4
    for which, number in (("first", 2), ("last", STEPS)):
        step = MeasuredStep.from_json(found[which]["ranks"])
        assert found[which]["step"] == number
        assert found[which]["microbatches"] == ROWS // MICRO
        passes = [(p.action, p.stage, p.microbatch) for rank in step.ranks for p in rank.passes]
        assert len(set(passes)) == len(passes)
        forward = {one[1:] for one in passes if one[0] == "forward"}
        assert forward == {(stage, number) for stage in range(stages) for number in range(ROWS // MICRO)}
        assert {one[0] for one in passes} <= kinds | {"backward"}
        assert [[part.name for part in rank.parts] for rank in step.ranks] == [["gradients", "update"]] * 2
        for rank in step.ranks:
            assert all(a.end_s <= b.begin_s + 1e-5 for a, b in itertools.pairwise(rank.passes))
        idle = step.idle()
        assert 0 < idle.share < 1
        assert sum(idle.causes.values()) == pytest.approx(idle.share)
        assert found[which]["idle"] == pytest.approx(idle.share, abs=1e-3)
    assert [row["step"] for row in found["history"]] == list(range(2, STEPS + 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_fitted_and_kept_in_the_checkpoint(ran, name):
    found = measured(ran(name))["model"]
    assert all(seconds >= 0 for seconds in found["seconds"].values())
    assert "dense, per token pair" in found["seconds"]
    newest = max((ran(name) / "checkpoints").iterdir(), key=lambda path: path.name)
    assert read_meta(newest)["parts"]["pipeline"]["fit"]["steps"] == STEPS - 1


@pytest.mark.parametrize("name", NAMES)
def test_the_report_draws_a_bar_for_each_part(ran, name):
    page = write_report(ran(name)).read_text()
    chart = re.search(r'aria-label="passes of step 4 by rank">(.*?)</svg>', page, re.S).group(1)
    last = MeasuredStep.from_json(measured(ran(name))["last"]["ranks"])
    assert chart.count("<rect") == sum(len(rank.passes) + len(rank.parts) for rank in last.ranks)
    assert "rank 1: forward, stage 2, micro-batch 3" in chart
    for cause in CAUSES:
        assert f"<td>{cause}</td>" in page
    assert "ranks&#39; speeds" in page


def test_a_file_that_is_something_else_is_left_out_of_the_page(ran):
    folder = ran("late")
    before = (folder / FILE).read_text()
    for text in ('{"first": 3}', "[]", '{"first": {"step": 1}, "last": {"step": 2}, "history": [], "model": {}}'):
        (folder / FILE).write_text(text)
        assert 'id="pipeline"' not in write_report(folder).read_text()
    (folder / FILE).write_text(before)
    assert 'id="pipeline"' in write_report(folder).read_text()
