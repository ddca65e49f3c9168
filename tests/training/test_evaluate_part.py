"""Evaluations on the way may take a part of the held-out rows; the last one takes all, and says what the part gives."""

import pytest

from tests.training.tiny import rows, tiny
from tilewright.training.session import train

SETTINGS = {"train__steps": 4, "train__eval_interval": 2, "checkpoint__interval": 0, "train__sample_tokens": 0}
SETTINGS |= {"precision__mode": "fp32", "log__report": False, "checkpoint__save_last": False}


def evaluations(data, folder, **changes):
    run = train(tiny(data, folder, **SETTINGS | changes))
    return run, {row["step"]: row for row in rows(run.run_dir / "metrics.jsonl") if "eval" in row}


@pytest.mark.parametrize("part", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_way_takes_a_part_and_the_end_takes_all(part, data, tmp_path):
    run, found = evaluations(data, tmp_path / "part", train__eval_batches=3, train__eval_part_batches=part)
    _, of_part = evaluations(data, tmp_path / "few", train__eval_batches=part)
    _, whole = evaluations(data, tmp_path / "all", train__eval_batches=3)
    assert found[2]["eval"] == of_part[2]["eval"]
    assert "eval_part" not in found[2]
    assert found[4]["eval_part"] == of_part[4]["eval"]
    for domain, result in whole[4]["eval"].items():
        last = found[4]["eval"][domain]
        assert (last["tokens"], last["bytes"]) == (result["tokens"], result["bytes"])
        assert last["loss"] == pytest.approx(result["loss"], rel=1e-12)  # FP64 sums of three terms
        assert run.evals[domain].loss == last["loss"]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (3, 100))])
def test_a_part_that_is_all_changes_nothing(part, data, tmp_path):
    _, found = evaluations(data, tmp_path / "part", train__eval_batches=3, train__eval_part_batches=part)
    _, whole = evaluations(data, tmp_path / "all", train__eval_batches=3)
    assert {step: row["eval"] for step, row in found.items()} == {step: row["eval"] for step, row in whole.items()}
    assert not any("eval_part" in row for row in found.values())


def test_a_stopped_run_ends_as_the_straight_one(data, tmp_path):
    """Whichever of its evaluations was the last one before the stop."""
    parts = {"train__eval_batches": 3, "train__eval_part_batches": 1, "checkpoint__save_last": True}
    evaluations(data, tmp_path / "twice", **parts, train__steps=2, optim__schedule="constant")
    _, twice = evaluations(data, tmp_path / "twice", **parts, optim__schedule="constant")
    _, straight = evaluations(data, tmp_path / "straight", **parts, optim__schedule="constant")
    assert twice[4]["eval"] == straight[4]["eval"]
    assert twice[4]["eval_part"] == straight[4]["eval_part"]
