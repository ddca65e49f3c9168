"""Where documents of a pipeline go once its passes were measured. What they take is said by the test, not by a clock,
so the machine's load decides nothing: a pass takes its tokens, and on the second data rank three times as long."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.test_document_run import PIPED, RUN, short  # noqa: F401
from tests.training.tiny import rows, tiny
from tilewright.parallel.pipeline.balance.measured_step import FILE, MeasuredStep
from tilewright.parallel.pipeline.balance.pass_times import PassClock
from tilewright.planner.machine import ceilings
from tilewright.training.hooks.pipeline_hook import LEAST, PipelineHook, size_of
from tilewright.training.session import train

pytestmark = pytest.mark.dist
SLOW, FACTOR = 1, 3.0
FEW = {"train__global_batch_size": 28, "train__micro_batch_size": 4}
FEW |= {"train__steps": 8, "train__eval_interval": 0, "checkpoint__interval": 0, "parallel__dp_replicate": 2}
CASES = {name: PIPED | FEW | {"parallel__balance": name} for name in ("off", "on")}
CASES["off"] |= {"train__steps": 3}


class SaidClock(PassClock):
    """Passes take what is said of their micro-batch."""

    seconds: tuple[float, ...] = ()

    def taken(self):
        passes, parts = super().taken()
        said = [replace(one, begin_s=0.0, seconds=self.seconds[one.microbatch]) for one in passes]
        return said, parts


def places(rank, data, folder):
    """The runs of a rank, one after the other."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    measured = PipelineHook.after_step

    def said(hook, step, result):
        clock = hook._executor.clock
        clock.__class__ = SaidClock
        slower = FACTOR if hook._world.data.rank == SLOW else 1.0
        clock.seconds = tuple(slower * 1e-3 * size_of(batch).tokens for batch in step.microbatches)
        measured(hook, step, result)

    PipelineHook.after_step = said
    for name, of_run in CASES.items():
        train(tiny(Path(data), Path(folder), **RUN | {"run__name": name} | of_run))


@pytest.fixture(scope="module")
def ran(short, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("places")
    on_ranks(4, places, str(short), str(folder))
    return folder


def tokens_by_rank(run: Path) -> dict[int, int]:
    """Of the documents of the last step, by data rank."""
    last = MeasuredStep.from_json(json.loads((run / FILE).read_text())["last"]["ranks"])
    return {rank.data_rank: sum(size.tokens for size in rank.sizes) for rank in last.ranks}


def share_of_slow(tokens: dict[int, int]) -> float:
    """Of all tokens; a quarter where ranks take as long."""
    return tokens[SLOW] / sum(tokens.values())


@pytest.mark.slow
def test_documents_go_where_they_take_as_long(ran):
    """And not without balance: then a slow rank has as much as the other one. Half-way between the two is the border,
    as speeds are followed step by step, and whole documents go."""
    on, off = (share_of_slow(tokens_by_rank(ran / name)) for name in ("on", "off"))
    assert on < 0.375 < off, (on, off)


@pytest.mark.slow
def test_each_change_of_places_is_an_event_with_its_numbers(ran):
    found = {
        name: [event for event in rows(ran / name / "events.jsonl") if event["kind"] == "balance"] for name in CASES
    }
    assert not found["off"]
    event = found["on"][0]
    assert event["moved"] > event["threshold"] == LEAST
    assert event["speeds_before"] == [1.0, 1.0]
    assert event["speeds"][SLOW] < 0.9 * event["speeds"][1 - SLOW]
    assert f"from step {event['step'] + 1} on" in event["message"]
    assert all(value >= 0 for value in event["coefficients"].values())


@pytest.mark.slow
def test_losses_are_those_of_other_places(ran):
    """Relative 1e-5 after three steps: the order of FP32 sums, and what Adam makes of it."""
    on, off = (
        {row["step"]: row["loss"] for row in rows(ran / name / "metrics.jsonl") if "loss" in row}
        for name in ("on", "off")
    )
    assert {step: on[step] for step in off} == pytest.approx(off, rel=1e-5)
