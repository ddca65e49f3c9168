"""`tilewright data skip`: a run that went over a bad stretch goes back and leaves out its samples, at any world."""

import shutil

import pytest

from tests.training.tiny import rows, tiny
from tilewright.cli.app import run as command
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.training.components.run_samples import left_out, samples_of_step, skip_steps
from tilewright.training.session import train

SMALL = {
    "train__eval_interval": 0,
    "train__sample_tokens": 0,
    "checkpoint__interval": 1,
    "checkpoint__keep_latest_k": 9,
}
SMALL |= {"optim__schedule": "constant", "model__num_layers": 1}


def samples(run, steps):
    return [[sample["sample"] for sample in samples_of_step(run, step)] for step in steps]


def test_samples_of_steps_are_left_out_and_listed_first(data, tmp_path, capsys):
    run = tmp_path / "tiny"
    train(tiny(data, tmp_path, **SMALL))
    for end in ("rejected", "partial"):  # neither is a checkpoint of the run
        other = shutil.copytree(run / "checkpoints/step_00000006", run / f"checkpoints/step_00000007.{end}")
        (other / "meta.json").write_text("{")
    before = samples(run, range(1, 7))
    assert before == [list(range(5 * n, 5 * n + 5)) for n in range(6)]
    with pytest.raises(CheckpointError, match="behind the newest checkpoint") as caught:
        skip_steps(run, 4, 5)
    problem = caught.value.problems[0]
    assert all((problem.got, problem.need, problem.try_))
    for path in problem.try_.split("   (")[0].removeprefix("rm -r ").split():
        shutil.rmtree(path)
    capsys.readouterr()
    assert command(["data", "skip", str(run), "--steps", "4:5"]) == 0
    assert "samples 15 to 24 are left out" in capsys.readouterr().out
    train(tiny(data, tmp_path, **SMALL))
    assert [row["step"] for row in rows(run / "metrics.jsonl") if "loss" in row] == list(range(1, 7))
    assert samples(run, range(1, 7)) == [*before[:3], *(list(range(25 + 5 * n, 30 + 5 * n)) for n in range(3))]
    assert left_out(run) == [(15, 25, "steps 4 to 5, by data skip")]
    (event,) = (row for row in rows(run / "events.jsonl") if row["kind"] == "skip_samples")
    assert (event["first"], event["stop"]) == (15, 25)
    capsys.readouterr()
    assert command(["data", "inspect", "--run", str(run), "--step", "4"]) == 0
    assert capsys.readouterr().out.startswith("samples 15 to 24 are left out (steps 4 to 5, by data skip)")


def test_steps_that_are_none_of_the_run(data, tmp_path, capsys):
    train(tiny(data, tmp_path, **SMALL | {"train__steps": 2}))
    for first, last in ((0, 1), (2, 1), (1, 3)):
        with pytest.raises(ConfigError, match="not steps of the run"):
            skip_steps(tmp_path / "tiny", first, last)
    assert command(["data", "skip", str(tmp_path / "tiny"), "--steps", "many"]) == 2
    assert "--steps many is not A:B" in capsys.readouterr().err
    assert command(["data", "skip", str(tmp_path / "nothing"), "--steps", "1:2"]) == 2
