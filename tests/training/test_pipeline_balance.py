"""Documents placed by measured cost: losses are those of one process, and a run goes on from its checkpoint."""

import json
from pathlib import Path

import pytest

from tests.ranks import on_ranks
from tests.training.test_document_run import INTERLEAVED, PIPED, RUN, STOP, ZBV, runs, short  # noqa: F401
from tests.training.tiny import rows
from tilewright.parallel.pipeline.balance.measured_step import FILE, MeasuredStep
from tilewright.training.checkpoint.checkpoint_meta import read_meta

pytestmark = [pytest.mark.dist, pytest.mark.slow]
"""By default `doctor --parallel` compares balanced documents with one process, and `test_pipeline_places` and
`test_pipeline_kill` have their runs."""
ON = {"parallel__balance": "on", "train__steps": 6, "train__eval_interval": 0}
CASES = {
    "zbv": ZBV | ON | {"parallel__dp_shard": 2},
    "stopped": PIPED | ON | STOP | {"parallel__dp_replicate": 2},
}


@pytest.fixture(scope="module")
def ran(short, tmp_path_factory):  # noqa: F811
    folder, found = tmp_path_factory.mktemp("balanced"), {}

    def launch(world, changes):
        for of_rank in on_ranks(world, runs, str(short), str(folder), changes):
            for name, value in of_rank.items():
                found.setdefault(name, []).append(value)

    launch(1, {"alone": {"train__eval_interval": 0}})
    launch(4, CASES)
    launch(2, {"stopped": INTERLEAVED | ON})
    return folder, found


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(folder / "metrics.jsonl") if "loss" in row}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_process(ran, name):
    """Relative 1e-5 after six steps: FP32 sums of a step, in another order, and what Adam makes of them."""
    folder, found = ran
    assert all(of_rank[0] == 6 for of_rank in found[name][-2:]), found[name]
    expected, got = losses(folder / "alone"), losses(folder / name)
    assert got.keys() == expected.keys()
    off = {step: abs(got[step] / expected[step] - 1) for step in got}
    worst = max(off, key=off.get)
    assert off[worst] <= 1e-5, f"step {worst}: {got[worst]}, alone {expected[worst]}"


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_stay_within_what_memory_was_planned_for(ran, name):
    folder, _ = ran
    last = MeasuredStep.from_json(json.loads((folder / name / FILE).read_text())["last"]["ranks"])
    tokens = [size.tokens for rank in last.ranks for size in rank.sizes]
    assert len(tokens) >= 4
    assert max(tokens) <= RUN["data__seq_len"] * RUN["train__micro_batch_size"]


def test_the_state_goes_on_with_other_ranks(ran):
    folder, _ = ran
    newest = max((folder / "stopped" / "checkpoints").iterdir(), key=lambda path: path.name)
    state = read_meta(newest)["parts"]["pipeline"]
    assert state["fit"]["steps"] == 4, "two of the first three steps, and two after the first one of the others"
    assert len(state["fit"]["speeds"]) == 2


def test_documents_go_where_they_cost_as_much(ran):
    """Data ranks and micro-batches of a balanced step, by tokens: as even as whole documents allow, or nearly."""
    folder, _ = ran
    last = MeasuredStep.from_json(json.loads((folder / "zbv" / FILE).read_text())["last"]["ranks"])
    of_rank = {rank.data_rank: sum(size.tokens for size in rank.sizes) for rank in last.ranks}
    assert len(of_rank) == 2
    assert max(of_rank.values()) - min(of_rank.values()) <= 2 * RUN["data__seq_len"], of_rank
