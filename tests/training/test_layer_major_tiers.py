"""Runs whose parameters, states and layer inputs are stored off the device: no number changes, nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.training.tiny import assert_same_run, last_state, settings, tiny, write_text
from tilewright.core.errors import ConfigError
from tilewright.training import assemble
from tilewright.training.session import train

LAYERS = {"memory__executor": "layer_major", "precision__mode": "fp32", "train__steps": 6, "train__eval_interval": 3}
AWAY = {"memory__offload_params": "disk", "memory__offload_optimizer": "cpu", "memory__offload_activations": "disk"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiers")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def at_home(data):
    """The run with everything on the device."""
    return train(tiny(data, data, run__name="at_home", **LAYERS)).run_dir


@pytest.mark.parametrize(
    "away",
    [
        pytest.param(AWAY, marks=pytest.mark.slow),
        {
            "memory__offload_params": "cpu",
            "memory__offload_optimizer": "disk",
            "memory__offload_activations": "cpu",
            "memory__prefetch": 0,
        },
        pytest.param({"memory__offload_optimizer": "disk", "memory__prefetch": 3}, marks=pytest.mark.slow),
    ],
)
def test_tiers_change_no_number(data, at_home, tmp_path, away):
    """memory.offload_params, states and inputs: losses, evaluations, samples and the whole state are the same bits."""
    run = train(tiny(data, tmp_path, **LAYERS, **away)).run_dir
    assert_same_run(run, at_home)
    assert written(run) == written(at_home)


def written(run):
    """The samples without the time at which they were written."""
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert rows
    return [{name: value for name, value in row.items() if name != "time_s"} for row in rows]


@pytest.mark.slow
def test_resume_in_other_tiers(data, at_home, tmp_path):
    """A checkpoint is the same wherever the slices were stored: it is taken up from disk, host and device."""
    options = LAYERS | {"run__name": "moved", "optim__schedule": "constant", "train__eval_interval": 0}
    train(tiny(data, tmp_path, **options | {"train__steps": 2}, **AWAY))
    train(tiny(data, tmp_path, **options | {"train__steps": 4}))
    moved = train(
        tiny(data, tmp_path, **options, memory__offload_params="cpu", memory__offload_optimizer="disk")
    ).run_dir
    reference = train(tiny(data, tmp_path, **options | {"run__name": "stayed"})).run_dir
    tensors, expected = last_state(moved)[0], last_state(reference)[0]
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


def test_folder_of_the_disk_tier(data, tmp_path):
    """memory.offload_dir is where the files of the disk tier are; one that cannot be made is an error before the
    run."""
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, OSError)):
        train(tiny(data, tmp_path, memory__offload_dir=tmp_path / "file" / "sub", **LAYERS, **AWAY))


def test_prefetch_takes_buffers(data, tmp_path):
    held = []
    for prefetch in (0, 1, 2):
        loaded = tiny(data, tmp_path, memory__prefetch=prefetch, memory__offload_params="cpu", **LAYERS)
        parts = assemble.build(assemble.set_up(loaded), fresh=True)
        held.append(len(parts.executor.run.offloader.parameters._slots.slots))
        parts.executor.run.offloader.close()
        parts.stream.close()
        parts.memory_tracker.close()
    assert held == [1, 2, 3]


def test_fp8_weights_and_experts_in_tiers(data, tmp_path):
    """Eight-bit matmuls read the weights of the moment, and routing is replayed, wherever the weights are stored."""
    options = LAYERS | {"precision__mode": "fp8_tile", "model__num_experts": 4, "train__checkpoint_inputs": "fp8"}
    options |= {"optim__clip": "delayed", "optim__master_weights": "stochastic", "ops__adam": "ref"}
    options |= {"train__steps": 3, "train__eval_interval": 0}
    home = train(tiny(data, tmp_path, run__name="home", **options)).run_dir
    away = train(tiny(data, tmp_path, run__name="away", **options, **AWAY)).run_dir
    tensors, expected = last_state(away)[0], last_state(home)[0]
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


def test_a_hugging_face_folder_at_the_end(data, tmp_path):
    """What is exported from disk is what is exported from the device."""
    from safetensors.torch import load_file

    options = LAYERS | {"checkpoint__export_hf": True, "train__steps": 2, "train__eval_interval": 0}
    home = train(tiny(data, tmp_path, run__name="home", **options)).run_dir
    away = train(tiny(data, tmp_path, run__name="away", **options, **AWAY)).run_dir
    here, there = (load_file(run / "hf" / "model.safetensors") for run in (home, away))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.slow
def test_kill_9_and_go_on(data, at_home, tmp_path):
    """The states on disk are a cache: a run killed in mid-step continues from its checkpoint to the same bits."""
    given = settings(data, tmp_path, **LAYERS, **AWAY, checkpoint__interval=1)
    code = "from tilewright.core.config.load import load_recipe; from tilewright.training.session import train; "
    command = [sys.executable, "-c", code + f"train(load_recipe(None, {given!r}, environ={{}}))"]
    for wait_for in ("step_00000002", "step_00000004"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (tmp_path / "tiny" / "checkpoints" / wait_for).exists() and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    tensors, expected = last_state(tmp_path / "tiny")[0], last_state(at_home)[0]
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []
