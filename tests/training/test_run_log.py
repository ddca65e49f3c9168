"""The record of a run: rows are never corrupt, doubled or lost; one trainer a folder; sinks are checked at the
start."""

import json
import math
import sys
import types
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.core.errors import ConfigError
from tilewright.training.executor.evaluate import DomainLoss
from tilewright.training.runlog.record_files import JsonLines, RunLog
from tilewright.training.runlog.recorder import MetricsLogger, open_sinks, scalars_of
from tilewright.training.runlog.run_folder import RunFolder, move_away
from tilewright.training.runlog.train_progress import step_line


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_there_at_once_and_not_finite_is_null(tmp_path):
    log = RunLog(tmp_path)
    row = log.metrics(1, loss=math.nan, memory={"other": math.inf, "parameters": 5}, skipped=None)
    assert math.isnan(row["loss"])
    (written,) = _rows(tmp_path / "metrics.jsonl")  # not closed yet
    assert written["loss"] is None
    assert written["memory"] == {"other": None, "parameters": 5}
    log.event(1, "overflow", "scale halved", loss_scale=2.0)
    log.sample(1, "code", "a", "b\nc")
    log.close()
    assert _rows(tmp_path / "events.jsonl")[0]["loss_scale"] == 2.0
    assert _rows(tmp_path / "samples.jsonl")[0]["text"] == "b\nc"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [float, torch.tensor, lambda value: [1.0, value], lambda value: {"x": (value,)}])
def test_no_value_stops_a_row_from_being_written_and_read(tmp_path, value, wrap):
    log = RunLog(tmp_path)
    log.metrics(1, loss=wrap(value), aux=2.0)
    log.event(1, "skip", "bad", grad_norm=wrap(value))
    log.precision(step=1, kind="sample", noise=wrap(value))
    log.close()
    for name in ("metrics", "events", "precision"):
        text = (tmp_path / f"{name}.jsonl").read_text()
        row = json.loads(text, parse_constant=pytest.fail)
        assert row["step"] == 1
    with RunFolder(tmp_path) as folder:
        folder.write_json("plan.json", {"tokens_per_s": wrap(value)})
        json.loads((tmp_path / "plan.json").read_text(), parse_constant=pytest.fail)


@examples(30)
@given(cut=st.integers(0, 60), resumed=st.integers(0, 8))
def test_resume_cuts_the_torn_line_and_later_rows(tmp_path_factory, cut, resumed):
    folder = tmp_path_factory.mktemp("log")
    log = RunLog(folder)
    log.event(0, "start", "new run")
    for step in range(1, 7):
        log.metrics(step, loss=float(step))
        log.event(step, "skip", "too large")
    log.event(6, "checkpoint_rejected", "torn")
    log.close()
    metrics = folder / "metrics.jsonl"
    data = metrics.read_bytes()
    metrics.write_bytes(data[: len(data) - cut])
    whole = data[: len(data) - cut].count(b"\n")

    log = RunLog(folder, resumed_step=resumed, elapsed_s=100.0)
    assert [row["step"] for row in _rows(metrics)] == list(range(1, min(whole, resumed) + 1))
    kinds = [(row["kind"], row["step"]) for row in _rows(folder / "events.jsonl")]
    assert kinds == [("start", 0), *(("skip", s) for s in range(1, min(resumed, 6) + 1)), ("checkpoint_rejected", 6)]
    assert log.metrics(resumed + 1, loss=0.0)["time_s"] >= 100.0
    log.close()


def test_a_run_that_begins_again_keeps_no_row_of_a_step_not_even_of_step_0(tmp_path):
    """It was killed before its first checkpoint; of loaded weights it had evaluated and written samples by then."""
    for _ in range(3):
        log = RunLog(tmp_path)
        log.event(0, "start", "new run")
        log.metrics(0, eval_loss=1.0)
        log.event(0, "eval", "held out 1.0")
        log.sample(0, "code", "a", "b")
        log.metrics(1, loss=1.0)
        log.close()
    assert [row["step"] for row in _rows(tmp_path / "metrics.jsonl")] == [0, 1]
    assert len(_rows(tmp_path / "samples.jsonl")) == 1
    assert [row["kind"] for row in _rows(tmp_path / "events.jsonl")] == ["start", "start", "start", "eval"]


def test_a_full_disk_is_one_error_and_closing_does_not_hide_it(tmp_path):
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(ConfigError, match="cannot be written") as caught, closing(lines):
        lines.append({"step": 1})
    assert "No space left" in caught.value.problems[0].got


class TakesThreeBytes:
    """A file on a disk that is nearly full: each write takes a part."""

    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += bytes(data[:3])
        return min(3, len(data))


def test_a_row_of_which_a_part_is_taken_is_written_to_its_end(tmp_path):
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.close()
    lines._file = TakesThreeBytes()
    lines.append({"step": 1, "text": "b\nc"})
    assert lines._file.data == b'{"step": 1, "text": "b\\nc"}\n'


def test_an_evaluation_line_names_the_unit_of_each_domain(tmp_path):
    lines = []
    progress = types.SimpleNamespace(note=lines.append, close=lambda: None)
    recorder = MetricsLogger(RunLog(tmp_path), progress, [], steps=9, memory_limit=1, scaled=False)
    text, images = DomainLoss(2.0, math.exp(2.0), 10, 30), DomainLoss(1.0, math.e, 10)
    recorder.evaluation(3, {"eval": {"code": text, "docs": text}, "eval_other": {"books": text}}, 0.1)
    recorder.evaluation(6, {"eval": {"code": text, "images": images}, "eval_other": {}}, 0.1)
    recorder.close()
    assert "| bits per byte by domain: code 0.962, docs 0.962 |" in lines[0]
    assert lines[0].endswith("| not trained on, bits per byte by domain: books 0.962")
    assert lines[1].endswith("| bits per byte by domain: code 0.962; perplexity by domain: images 2.718")


def test_second_trainer_in_a_folder_is_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="Another process is training") as caught:
        RunFolder(tmp_path / "run")
    assert "holds the lock" in caught.value.problems[0].got
    folder.close()
    RunFolder(tmp_path / "run").close()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run")


def test_latest_follows_the_newest_run_and_spares_a_run_of_that_name(tmp_path):
    for name in ("a", "b"):
        folder = RunFolder(tmp_path / name)
        folder.link_latest()
        folder.close()
        assert (tmp_path / "latest").resolve() == tmp_path / name
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    folder = RunFolder(tmp_path / "a")
    folder.link_latest()
    folder.close()
    assert not (tmp_path / "latest").is_symlink()


def test_move_away_never_overwrites(tmp_path):
    moved = []
    for _ in range(2):
        (tmp_path / "run").mkdir()
        moved.append(move_away(tmp_path / "run").name)
    assert moved == ["run.old-1", "run.old-2"]
    assert move_away(tmp_path / "run") is None


def test_missing_sink_stops_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="sink wandb is not installed") as caught:
        open_sinks(["wandb"], tmp_path, {})
    assert "tilewright[wandb]" in caught.value.problems[0].try_


def test_tensorboard_gets_the_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks(["tensorboard"], tmp_path, {})
    for step in (1, 2):
        sink.log(step, scalars_of({"step": step, "loss": 2.0 / step, "skipped": None, "bad": math.nan}))
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_are_told_name_config_scalars_and_the_end(name, tmp_path, monkeypatch):
    told = []
    module = types.SimpleNamespace(
        init=lambda **options: told.append(("init", options)),
        log=lambda values, step: told.append((step, values)),
        finish=lambda: told.append("finish"),
    )
    monkeypatch.setitem(sys.modules, name, module)
    (sink,) = open_sinks([name], tmp_path / "run7", {"optim": {"lr": 0.1}})
    sink.log(3, {"loss": 1.5})
    sink.close()
    options = {"project": "tilewright", "name": "run7", "config": {"optim": {"lr": 0.1}}}
    assert told == [("init", options), (3, {"loss": 1.5}), "finish"]


def test_step_line_has_fixed_columns():
    row = {
        "step": 120, "loss": 3.41019, "grad_norm": 0.8123, "lr": 2.9e-4, "loss_scale": 65536.0,
        "memory_bytes": 11.2 * 2**30, "tokens_per_s": 8412.3, "wait_share": 0.012,
        "memory": {"parameters": 2**30, "optimizer": 5 * 2**30, "activations": 4 * 2**30, "other": 1.2 * 2**30},
    }  # fmt: skip
    line = step_line(row, steps=2000, memory_limit=24 * 2**30, num_skips=0, seconds_left=720.0, scaled=True)
    assert line == (
        "step 120/2000 | loss 3.4102 | gnorm 0.812 | lr 2.9e-04 | scale 65536 (0 skips) | mem 11.2/24.0 GiB"
        " (optimizer 5.0, activations 4.0)"
        " | 8,412 tok/s | wait 1.2 % | eta 12m00s"
    )
