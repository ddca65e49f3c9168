"""What may happen to a run while it is under way: its folder, its files, its process; and how often it is saved."""

import json
import shutil
import signal
import time

import pytest

from tests.training.test_kill import _start, _wait_for_step
from tests.training.tiny import assert_same_run, rows, tiny
from tilewright.core.config.load import load_recipe
from tilewright.training.session import train

# Longer than a test needs it, and so short that no rates are measured again for its end (`pace.WORTH_S`).
LONG = {"train__steps": 600, "checkpoint__interval": 0, "checkpoint__interval_minutes": 0}


def kinds(run) -> list[str]:
    return [row["kind"] for row in rows(run / "events.jsonl")]


# ---- when a checkpoint is written ----


def test_by_default_a_run_is_saved_every_five_minutes():
    recipe = load_recipe(None, environ={}).recipe
    assert (recipe.checkpoint.interval_minutes, recipe.checkpoint.interval) == (5, 0)


def test_minutes_write_checkpoints_between_steps(data, tmp_path):
    changes = {"checkpoint__interval": 0, "checkpoint__interval_minutes": 1e-6, "checkpoint__keep_latest_k": 20}
    train(tiny(data, tmp_path, **changes))
    saved = [row["step"] for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "save"]
    assert saved == list(range(1, 7))


@pytest.mark.parametrize("minutes", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_a_short_run_is_saved_at_its_end_alone(data, tmp_path, minutes):
    train(tiny(data, tmp_path, checkpoint__interval=0, checkpoint__interval_minutes=minutes))
    assert [path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir()] == ["step_00000006"]


# ---- resume ----


def test_a_run_killed_before_its_first_checkpoint_starts_again_and_says_so(data, tmp_path, capfd):
    process = _start(data, tmp_path, **LONG)
    _wait_for_step(process, tmp_path, 3)
    process.kill()
    process.communicate(timeout=120)
    assert not (tmp_path / "tiny" / "checkpoints").exists()
    train(tiny(data, tmp_path))
    assert "no checkpoint: starting at step 1" in capfd.readouterr().out
    (row,) = [row for row in rows(tmp_path / "tiny" / "events.jsonl") if row["kind"] == "restart"]
    assert row["message"] == "no checkpoint: starting at step 1"
    train(tiny(data, tmp_path / "other"))
    assert "restart" not in kinds(tmp_path / "other" / "tiny")
    assert_same_run(tmp_path / "tiny", tmp_path / "other" / "tiny")


def test_sigint_saves_and_exits_with_0(data, tmp_path):
    process = _start(data, tmp_path, **LONG)
    _wait_for_step(process, tmp_path, 3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "the same command continues from there" in said
    assert list((tmp_path / "tiny" / "checkpoints").iterdir())


# ---- the folder ----


@pytest.mark.parametrize("how", ["deleted", pytest.param("moved", marks=pytest.mark.slow), "replaced"])
@pytest.mark.parametrize("minutes", [pytest.param(0, marks=pytest.mark.slow), 0.001])
def test_a_run_folder_that_goes_away_is_an_error_in_four_parts(data, tmp_path, how, minutes):
    process = _start(data, tmp_path, **LONG | {"checkpoint__interval_minutes": minutes})
    _wait_for_step(process, tmp_path, 3)
    folder = tmp_path / "tiny"
    folder.rename(tmp_path / "away")
    if how == "deleted":
        shutil.rmtree(tmp_path / "away", ignore_errors=True)
    elif how == "replaced":
        folder.mkdir()
        (folder / ".lock").touch()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert "Traceback" not in said
    assert "Run folder was deleted or moved" in said
    for part in ("where", "got", "need", "try"):
        assert f"\n  {part}" in said
    assert how == "replaced" or not folder.exists(), "it came back"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", *(pytest.param(f"{one}.jsonl", marks=pytest.mark.slow) for one in ("events", "samples"))]
)
def test_a_file_that_is_deleted_begins_again(data, tmp_path, name):
    process = _start(data, tmp_path, **LONG)
    _wait_for_step(process, tmp_path, 5)
    path = tmp_path / "tiny" / name
    path.unlink()
    deadline = time.monotonic() + 60
    while not path.exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if name == "metrics.jsonl":
        _wait_for_step(process, tmp_path, 1)  # the row of the step that found it missing is lost with the old file
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    events = rows(tmp_path / "tiny" / "events.jsonl")
    (row,) = [row for row in events if row["kind"] == "file_deleted"]
    assert name in row["message"]
    if name == "metrics.jsonl":
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps[0] > row["step"]
