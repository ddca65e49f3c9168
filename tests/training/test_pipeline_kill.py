"""A rank of a pipeline on whole documents is killed (SIGKILL) in the middle of a pass: the other one names it and where
it was, the same command goes on from the checkpoint, and the weights are those of an undisturbed run."""

import time
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.ranks_that_die import on_ranks_of_which_one_dies
from tests.training.test_document_run import PIPED, RUN, runs, short  # noqa: F401
from tests.training.tiny import last_state, rows, tiny
from tilewright.core.errors import TilewrightError
from tilewright.planner.machine import ceilings
from tilewright.training.session import train

pytestmark = pytest.mark.dist
SHORT = {"train__steps": 6, "train__eval_interval": 0, "checkpoint__interval": 2}
BALANCED = PIPED | SHORT | {"parallel__balance": "on", "parallel__schedule": "zbv", "model__tie_embeddings": "true"}
LISTED = PIPED | SHORT | {"parallel__schedule": "gpipe"}
CASES = {
    # name: (settings, ranks, who is killed, in which of its calls of what, what is said of where it was)
    "balanced": (BALANCED, 2, 1, "backward_one_chunk", "backward of inputs of micro-batch"),
    "in order": (LISTED, 2, 0, "forward_one_chunk", "forward of micro-batch 2, stage 1"),
    "shards": (BALANCED | {"parallel__dp_shard": 2}, 4, 2, "backward_weight_one_chunk", "backward of weights"),
}


def dies(rank, data, folder, name, changes, victim, call, mark):
    """One rank of a run; what it ends with. One of them is in a pass of step 4 or so for ever."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    before = getattr(PipelineStage, call)

    def sleeps(self, number, *args, **named):
        if (Path(folder) / name / "checkpoints" / "step_00000002").exists() and number == 1 and rank == victim:
            Path(mark).touch()
            time.sleep(600)
        return before(self, number, *args, **named)

    setattr(PipelineStage, call, sleeps)
    try:
        train(tiny(Path(data), Path(folder), **RUN | {"run__name": name} | changes))
    except TilewrightError as error:
        return str(error)
    return "it came to its end"


def _check(name, data, folder):
    changes, world, victim, call, where = CASES[name]
    on_ranks(world, runs, str(data), str(folder), {"whole": changes})
    mark = folder / "asleep"
    given = (str(data), str(folder), "killed", changes, victim, call, str(mark))
    for rank, said in on_ranks_of_which_one_dies(world, victim, mark, 0.0, dies, *given).items():
        assert f"Rank {victim} of {world} has failed in step " in said, f"rank {rank}: {said}"
        assert where in said, f"rank {rank}: {said}"
    for of_rank in on_ranks(world, runs, str(data), str(folder), {"killed": changes}):
        assert of_rank["killed"][0] == 6, of_rank["killed"]
    losses = [
        {row["step"]: row["loss"] for row in rows(folder / run / "metrics.jsonl") if "loss" in row}
        for run in ("killed", "whole")
    ]
    (tensors, meta), (expected, expected_meta) = (last_state(folder / run) for run in ("killed", "whole"))
    assert meta["parts"]["stream"] == expected_meta["parts"]["stream"]
    assert tensors.keys() == expected.keys()
    if changes.get("parallel__balance") != "on":
        assert losses[0] == losses[1]
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        return
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # the order of sums follows what was measured
    for name in (name for name in expected if name.startswith("model.")):
        worst = (tensors[name].float() - expected[name].float()).abs().max().item()
        assert worst < 1e-4, f"{name} is off by {worst:.2g}"  # Adam divides small gradients by small ones


@pytest.mark.slow
def test_documents_that_are_balanced(short, tmp_path):  # noqa: F811
    _check("balanced", short, tmp_path)


@pytest.mark.slow
@pytest.mark.support("kill", "stages")
@pytest.mark.parametrize("name", ["in order", "shards"])
def test_more_of_them(name, short, tmp_path):  # noqa: F811
    _check(name, short, tmp_path)
