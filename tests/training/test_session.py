"""A whole run in small: what it writes, how it stops, and that running equals never having stopped."""

import json
import math
import os
import shutil
import signal

import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.training.tiny import assert_same_run, last_state, rows, tiny
from tilewright.core.errors import CheckpointError, ConfigError, FitError, HardwareError, NumericsError
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.run import Run
from tilewright.training.runlog.record_files import RunLog
from tilewright.training.session import train

CASES = {
    "bf16": {},
    "loss_scale": {"precision__mode": "hybrid", "precision__loss_scale": 1024.0, "precision__loss_scale_window": 3},
    "switch": {"precision__start_mode": "tf32", "precision__start_fraction": 0.5},
    "pure_fp16": {"precision__mode": "pure_fp16"},
    "bf16_states": {"optim__moments": "bf16", "optim__clip_adaptive": 1.05, "optim__schedule": "wsd"},
    "stochastic": {"optim__master_weights": "stochastic", "optim__moments": "bf16"},
    "split24": {"optim__master_weights": "split24", "optim__moments": "8bit"},
    "moe": {"model__num_experts": 4, "model__attention": "mla"},
    "fp8": {"precision__mode": "fp8_tile", "precision__start_mode": "bf16_mixed", "precision__start_fraction": 0.4},
    "fp8_moe": {"precision__mode": "fp8_hybrid", "model__num_experts": 4, "train__activation_checkpoint": "full"},
    "integers": {"precision__rules": '[{compute = "int4_a8"}, {op = "head", compute = "int8"}]'},
    "checkpointing": {"train__activation_checkpoint": "full", "checkpoint__async_save": False},
}


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """Uninterrupted runs by case, each made once."""
    made = {}

    def run(case: str):
        if case not in made:
            runs = tmp_path_factory.mktemp(case)
            stopped = train(tiny(data, runs, **CASES[case])).stopped
            assert stopped is None, f"the reference was stopped by {stopped}: did a time limit of the tests run out?"
            made[case] = runs / "tiny"
        return made[case]

    return run


def _kill_at(monkeypatch, step: int, number: int = signal.SIGTERM):
    """Send this process a signal in the middle of a step."""
    real = RunLog.step

    def recorded(self, counters, *args):
        row = real(self, counters, *args)
        if counters.step == step:
            os.kill(os.getpid(), number)
        return row

    monkeypatch.setattr(RunLog, "step", recorded)


def test_run_folder_holds_everything(data, tmp_path, straight, capsys):
    run = straight("bf16")
    for name in ("run.toml", "machine.json", "plan.json", "data.json", "precision.json", "tokenizer.json"):
        assert (run / name).stat().st_size > 0, name
    machine = json.loads((run / "machine.json").read_text())
    assert machine["kernels"]
    assert machine["matmul_switches"]["allow_bf16_reduced_precision_reduction"] in (True, False)
    metrics = rows(run / "metrics.jsonl")
    steps = [row for row in metrics if "eval" not in row]
    assert [row["step"] for row in steps] == list(range(1, 7))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[0]["loss"] == pytest.approx(math.log(300), abs=0.3)
    assert all(row["wait_share"] < 1 and row["tokens_per_s"] > 0 for row in steps)
    assert [row["step"] for row in steps if "memory" in row] == [1, 2, 4, 6]
    assert steps[-1]["tokens"] == sum(round(row["tokens_per_s"] * (row["step_s"] + row["wait_s"])) for row in steps)
    evals = [row for row in metrics if "eval" in row]
    assert [row["step"] for row in evals] == [3, 6]
    assert set(evals[0]["eval"]) == {"alpha", "beta"}
    assert evals[-1]["eval"]["alpha"]["ppl"] == pytest.approx(math.exp(evals[-1]["eval"]["alpha"]["loss"]))
    kinds = [row["kind"] for row in rows(run / "events.jsonl")]
    assert (
        next(kind for kind in kinds if kind != "slow_mode") == "start"
    )  # where the mode is slow here, that comes first
    assert kinds[-1] == "done"
    assert kinds.count("save") == 3
    last = evals[-1]["eval"]
    assert all(
        row["bits_per_byte"] == pytest.approx(math.log2(row["ppl"]) * row["tokens"] / row["bytes"])
        for row in last.values()
    )
    samples = rows(run / "samples.jsonl")
    assert [sample["domain"] for sample in samples] == ["alpha", "beta"]
    assert all(sample["prompt"] for sample in samples)
    assert (run.parent / "latest").resolve() == run
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "step_00000002", "step_00000004", "step_00000006",
    ]  # fmt: skip


QUICK = ("loss_scale", "split24", "fp8")
"""By default; the others vary what these keep, and a test of their own stops runs before and after a switch."""


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
@pytest.mark.support("resume", "one")
@pytest.mark.support("bf16", "one")
def test_stopped_and_resumed_equals_never_stopped_bitwise(case, data, tmp_path, straight, monkeypatch):
    reference = straight(case)
    with monkeypatch.context() as patch:
        _kill_at(patch, step=5)
        first = train(tiny(data, tmp_path, **CASES[case]))
    assert first.stopped == "SIGTERM"
    assert first.step == 5
    assert rows(tmp_path / "tiny" / "events.jsonl")[-1]["kind"] == "stop"
    torch.manual_seed(999)  # what the process did meanwhile
    second = train(tiny(data, tmp_path, **CASES[case]))
    assert second.stopped is None
    assert_same_run(tmp_path / "tiny", reference)


@pytest.mark.parametrize("case", [pytest.param("bf16", marks=pytest.mark.slow), "split24"])
def test_stopped_before_the_first_step_and_resumed_equals_never_stopped_bitwise(
    case, data, tmp_path, straight, monkeypatch
):
    reference = straight(case)
    with monkeypatch.context() as patch:
        real = Run.train
        patch.setattr(Run, "train", lambda run, stop: (stop.request("SIGTERM"), real(run, stop))[1])
        first = train(tiny(data, tmp_path, **CASES[case]))
    assert (first.stopped, first.step) == ("SIGTERM", 0)
    torch.manual_seed(999)  # what the process did meanwhile
    train(tiny(data, tmp_path, **CASES[case]))
    assert_same_run(tmp_path / "tiny", reference)


def test_a_reference_that_a_signal_stopped_is_named(tmp_path):
    for name, kind in (("run", "done"), ("reference", "stop")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(json.dumps({"kind": kind, "message": "SIGTERM"}) + "\n")
    with pytest.raises(AssertionError, match="the reference was stopped: SIGTERM"):
        assert_same_run(tmp_path / "run", tmp_path / "reference")


def test_two_straight_runs_are_bitwise_equal(data, tmp_path, straight):
    train(tiny(data, tmp_path))
    assert_same_run(tmp_path / "tiny", straight("bf16"))


def test_loss_scale_and_switch_are_in_the_record(straight):
    scales = [row["loss_scale"] for row in rows(straight("loss_scale") / "metrics.jsonl") if "loss_scale" in row]
    assert scales[:4] == [1024.0, 1024.0, 1024.0, 2048.0]
    switches = [row for row in rows(straight("switch") / "events.jsonl") if row["kind"] == "precision_switch"]
    assert [(row["step"], row["message"]) for row in switches] == [(4, "tf32 -> bf16_mixed from step 4 on")]


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_a_switch_is_told_once_wherever_the_run_stops(step, data, tmp_path, straight, monkeypatch):
    with monkeypatch.context() as patch:
        _kill_at(patch, step)
        train(tiny(data, tmp_path, **CASES["switch"]))
    train(tiny(data, tmp_path, **CASES["switch"]))
    events = rows(tmp_path / "tiny" / "events.jsonl")
    assert [row["step"] for row in events if row["kind"] == "precision_switch"] == [4]
    assert_same_run(tmp_path / "tiny", straight("switch"))


def test_torn_newest_checkpoint_is_said_and_the_one_before_is_used(data, tmp_path, straight, capsys):
    train(tiny(data, tmp_path))
    run = tmp_path / "tiny"
    newest = run / "checkpoints" / "step_00000006" / "__0_0.distcp"
    newest.write_bytes(newest.read_bytes()[:1000])
    (run / "checkpoints" / "step_00000009.partial").mkdir()
    capsys.readouterr()
    result = train(tiny(data, tmp_path))
    assert result.step == 6
    said = capsys.readouterr().out
    assert "step_00000006 cannot be used: __0_0.distcp has 1000 bytes" in said
    assert "step_00000009.partial was never finished" in said
    assert "from step 4" in said
    events = [row["kind"] for row in rows(run / "events.jsonl")]
    assert events.count("checkpoint_rejected") == 2
    assert "recovered" in events
    assert_same_run(run, straight("bf16"))
    assert (run / "checkpoints" / "step_00000006.rejected").is_dir()


def test_nothing_sound_is_an_error_that_loses_nothing(data, tmp_path):
    train(tiny(data, tmp_path, checkpoint__keep_latest_k=1))
    meta = tmp_path / "tiny" / "checkpoints" / "step_00000006" / "meta.json"
    meta.write_text("{}")
    with pytest.raises(CheckpointError, match="No valid checkpoint") as caught:
        train(tiny(data, tmp_path))
    assert "meta.json has 2 bytes" in caught.value.problems[0].got
    assert meta.exists()
    train(tiny(data, tmp_path, checkpoint__resume="never"))
    assert (tmp_path / "tiny.old-1" / "checkpoints" / "step_00000006" / "meta.json").read_text() == "{}"
    kinds = [row["kind"] for row in rows(tmp_path / "tiny" / "events.jsonl")]
    assert next(kind for kind in kinds if kind != "slow_mode") == "start"


def test_required_resume_without_a_checkpoint(data, tmp_path):
    with pytest.raises(CheckpointError, match="No valid checkpoint"):
        train(tiny(data, tmp_path, checkpoint__resume="required"))


def test_checkpoint_of_another_model(data, tmp_path):
    train(tiny(data, tmp_path, train__steps=3))
    with pytest.raises(CheckpointError, match="another model") as caught:
        train(tiny(data, tmp_path, model__dim=64))
    problem = caught.value.problems[0]
    assert "in the checkpoint" in problem.got
    assert problem.need
    assert problem.try_
    assert caught.value.exit_code == 2


def test_checkpoint_of_other_data(data, tmp_path):
    train(tiny(data, tmp_path, train__steps=3))
    with pytest.raises(CheckpointError, match="Dataset changed: the saved data position is invalid"):
        train(tiny(data, tmp_path, data__seq_len=48))


def test_changed_recipe_is_said_and_goes_on(data, tmp_path, capsys):
    train(tiny(data, tmp_path, train__steps=3))
    capsys.readouterr()
    train(tiny(data, tmp_path, train__steps=6, run__seed=5, optim__lr=0.005, data__weights="{alpha = 1.0, beta = 0.0}"))
    said = capsys.readouterr().out
    assert "optim.lr: 0.001 -> 0.005 (changes the numbers)" in said
    assert "train.steps: 3 -> 6" in said
    assert "the order of the data stays that of the checkpoint's seed" in said
    assert "the new data.weights hold from sample" in said
    assert last_state(tmp_path / "tiny")[1]["parts"]["stream"]["stages"][-1][1] == [1.0, 0.0]


@pytest.mark.slow
def test_new_weights_survive_a_kill_before_the_next_checkpoint(data, tmp_path):
    """run.toml says them by then, the checkpoint not yet."""
    changed = {"train__steps": 16, "data__weights": "{alpha = 1.0, beta = 0.0}", "train__global_batch_size": 24}
    changed["train__micro_batch_size"] = 12
    for name in ("killed", "whole"):
        train(tiny(data, tmp_path, run__name=name, train__steps=3))
    train(tiny(data, tmp_path, run__name="whole", **changed))
    shutil.copy(tmp_path / "whole" / "run.toml", tmp_path / "killed" / "run.toml")
    train(tiny(data, tmp_path, run__name="killed", **changed))
    assert last_state(tmp_path / "whole")[1]["parts"]["stream"]["stages"][-1][1] == [1.0, 0.0]
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    logs = [(tmp_path / name / "mixture.jsonl").read_bytes() for name in ("killed", "whole")]
    assert logs[0] == logs[1]
    rows = [json.loads(line) for line in logs[0].splitlines()]
    assert [row["kind"] for row in rows] == ["stage", "size", "size", "stage"]
    assert last_state(tmp_path / "whole")[1]["parts"]["stream"]["log"][0] == len(rows)


def test_a_lost_log_of_the_mixture_is_said_and_changes_no_sample(data, tmp_path):
    changed = {"data__weights": "{alpha = 1.0, beta = 0.0}"}
    for name in ("lost", "whole"):
        train(tiny(data, tmp_path, run__name=name, train__steps=2))
        train(tiny(data, tmp_path, run__name=name, train__steps=4, **changed))
    (tmp_path / "lost" / "mixture.jsonl").write_text("")
    for name in ("lost", "whole"):
        train(tiny(data, tmp_path, run__name=name, train__steps=6, **changed))
    losses = [
        [row["loss"] for row in rows(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in ("lost", "whole")
    ]
    assert losses[0] == losses[1]
    said = [row["message"] for row in rows(tmp_path / "lost" / "events.jsonl") if row["kind"] == "mixture_log"]
    assert len(said) == 1
    assert "samples before" in said[0]


def test_a_finished_run_says_so(data, tmp_path, capsys):
    train(tiny(data, tmp_path, train__steps=2))
    before = (tmp_path / "tiny" / "events.jsonl").read_bytes()
    capsys.readouterr()
    assert train(tiny(data, tmp_path, train__steps=2)).step == 2
    assert "has reached step 2 of 2" in capsys.readouterr().out
    assert (tmp_path / "tiny" / "events.jsonl").read_bytes() == before


def test_bad_numbers_stop_the_run_with_the_last_good_state(data, tmp_path, monkeypatch):
    """From step 5 on the loss is NaN; the weights of step 4 are saved."""
    from tilewright.training import assemble

    real = assemble.build_trained

    def poisoned(*args, **kwargs):
        model = real(*args, **kwargs)
        loss, calls = model.loss, []

        def bad(batch):
            calls.append(1)
            output = loss(batch)
            return type(output)(output.loss_sum * (math.nan if len(calls) > 12 else 1.0), output.count)

        model.loss = bad
        return model

    monkeypatch.setattr(assemble, "build_trained", poisoned)
    with pytest.raises(NumericsError, match="3 steps in a row") as caught:
        train(tiny(data, tmp_path, train__eval_interval=0, train__steps=8))
    assert caught.value.exit_code == 4
    run = tmp_path / "tiny"
    events = rows(run / "events.jsonl")
    assert [row["step"] for row in events if row["kind"] == "skip"] == [5, 6]
    assert events[-1]["kind"] == "stop"
    assert "first in backward order" in events[-1]["message"]
    tensors, meta = last_state(run)
    assert meta["parts"]["counters"]["step"] == 7
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point())
    metrics = [row for row in rows(run / "metrics.jsonl") if "loss" in row]
    assert metrics[-1]["loss"] is None
    assert metrics[-1]["skipped"]


@pytest.mark.support("memory", "one")
def test_running_out_of_device_memory_names_owners_and_saves_the_steps_before(data, tmp_path, straight, monkeypatch):
    real = StandardExecutor.step

    def step(self, microbatches, lr):
        if len(self.optimizer.state) and int(next(iter(self.optimizer.state.values()))["step"]) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, microbatches, lr)

    monkeypatch.setattr(StandardExecutor, "step", step)
    with pytest.raises(FitError, match="Out of memory in step 6") as caught:
        train(tiny(data, tmp_path))
    got = caught.value.problems[0].got.splitlines()
    assert "Tried to allocate 2.00 GiB" in got[0]
    assert {"bytes", "parameters", "optimizer", "activations", "other", "sum"} <= {line.split()[0] for line in got}
    assert {"forward", "backward", "update"} <= set(next(line for line in got if line.startswith("bytes")).split())
    fixes = caught.value.problems[0].try_.splitlines()
    assert len(fixes) == 3
    assert all(line.startswith("--") and "on the device" in line and "a step" in line for line in fixes), fixes
    assert last_state(tmp_path / "tiny")[1]["parts"]["counters"]["step"] == 5
    kinds = [row["kind"] for row in rows(tmp_path / "tiny" / "events.jsonl")]
    assert kinds[-1] == "save"
    assert "stop" in kinds[-3:]
    monkeypatch.setattr(StandardExecutor, "step", real)
    train(tiny(data, tmp_path))
    assert_same_run(tmp_path / "tiny", straight("bf16"))


@pytest.mark.parametrize("error", [None, MemoryError()], ids=["torch's allocator", "python's"])
def test_the_host_running_out_of_memory_is_told_like_the_device(data, tmp_path, monkeypatch, error):
    def forward(*_):
        if error is not None:
            raise error
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr("tilewright.models.decoder.decoder.batch_loss", forward)
    with pytest.raises(FitError, match="Out of memory in step 1") as caught:
        train(tiny(data, tmp_path))
    assert "forward" in caught.value.problems[0].got
    event = rows(tmp_path / "tiny" / "events.jsonl")[-1]
    assert event["memory_phases"]["forward"]["parameters"] > 0


def test_a_model_that_finds_no_memory_says_so(data, tmp_path, monkeypatch):
    monkeypatch.setattr("tilewright.training.assemble.make_optimizer", lambda *_: torch.empty(2**60))
    with pytest.raises(FitError, match="Out of memory while the model was made"):
        train(tiny(data, tmp_path))


def test_an_error_that_is_not_about_memory_stays_what_it_is(data, tmp_path, monkeypatch):
    def forward(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("tilewright.models.decoder.decoder.batch_loss", forward)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(tiny(data, tmp_path))


def test_a_disk_that_refuses_is_loud_and_the_run_goes_on_to_its_end(data, tmp_path, capsys):
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="step 6 could not be written") as caught:
        train(tiny(data, tmp_path))
    assert "FileExistsError" in caught.value.problems[0].got
    assert "could not be written" in capsys.readouterr().out
    events = [row["kind"] for row in rows(run / "events.jsonl")]
    assert events.count("save_failed") == 3  # steps 2, 4 and 6
    assert rows(run / "metrics.jsonl")[-1]["step"] == 6


@pytest.mark.support("export", "one")
def test_export_and_sinks(data, tmp_path):
    pytest.importorskip("tensorboard")
    train(tiny(data, tmp_path, train__steps=2, checkpoint__export_hf=True, log__sinks='["tensorboard"]'))
    run = tmp_path / "tiny"
    assert (run / "hf" / "config.json").exists()
    assert list((run / "hf").glob("*.safetensors"))
    assert (run / "hf" / "tokenizer.json").exists()
    assert list((run / "tensorboard").iterdir())


def test_dry_run_keeps_nothing_and_compares(data, tmp_path, capsys):
    result = train(tiny(data, tmp_path), dry_run=True)
    assert result.step == 2
    assert result.run_dir is None
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    assert "step 2: loss" in said
    for owner in ("parameters", "optimizer", "activations", "peak"):
        assert owner in said


def test_what_cannot_fit_is_refused_before_anything_is_built(data, tmp_path):
    with pytest.raises(FitError) as caught:
        train(tiny(data, tmp_path, plan__device_memory="1MB"))
    assert caught.value.exit_code == 3
    assert caught.value.problems[0].try_
    assert train(tiny(data, tmp_path, plan__device_memory="1MB", plan__enforce="false", train__steps=1)).step == 1


def test_a_compiler_that_is_not_there(data, tmp_path, monkeypatch):
    from dataclasses import replace

    from tilewright.training import assemble

    real = assemble.detect_machine
    monkeypatch.setattr(assemble, "detect_machine", lambda device: replace(real(device), cxx_compiler=None))
    monkeypatch.setattr(
        "tilewright.planner.machine.ceilings.measure", fixed_ceilings
    )  # of no machine that was measured before
    with pytest.raises(HardwareError, match="cannot be compiled"):
        train(tiny(data, tmp_path, train__compile="on"))


def test_a_missing_sink_stops_before_training(data, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="sink wandb"):
        train(tiny(data, tmp_path, log__sinks='["wandb"]'))
