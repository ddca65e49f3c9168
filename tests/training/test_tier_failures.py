"""A disk tier that fails in mid-run stops the run with an error that says what to do, and costs no checkpoint."""

import errno
import os

import pytest
import torch

from tests.training.tiny import last_state, tiny, write_text
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.training.session import train

LAYERS = {"memory__executor": "layer_major", "precision__mode": "fp32", "train__steps": 6, "train__eval_interval": 0}
DISK = {"memory__offload_params": "disk", "memory__offload_optimizer": "disk", "checkpoint__interval": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def sound(data):
    """The run of a disk that works."""
    return last_state(train(tiny(data, data, run__name="sound", **LAYERS)).run_dir)[0]


class FailingDisk:
    """Works for so many calls, and no longer."""

    def __init__(self, call, calls_left, fault):
        self.call, self.calls_left, self.fault = call, calls_left, fault

    def __call__(self, *arguments):
        self.calls_left -= 1
        if self.calls_left < 0:
            raise OSError(self.fault, os.strerror(self.fault))
        return self.call(*arguments)


@pytest.mark.parametrize(
    ("call", "calls", "fault", "says"),
    [
        pytest.param("pwritev", 30, errno.ENOSPC, "Offload file cannot be written", marks=pytest.mark.slow),
        ("preadv", 45, errno.EIO, "Offload file cannot be read"),
    ],
)
def test_what_was_saved_is_gone_on_from(data, sound, tmp_path, monkeypatch, call, calls, fault, says):
    loaded = tiny(data, tmp_path, **LAYERS, **DISK)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, FailingDisk(getattr(os, call), calls, fault))
        with pytest.raises(HardwareError, match=says) as caught:
            train(loaded)
    assert "newest checkpoint" in caught.value.problems[0].try_
    saved = sorted(path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir())
    assert saved, "the fault came after a checkpoint"
    assert "step_00000006" not in saved, "and before the end"
    tensors = last_state(train(loaded).run_dir)[0]
    assert [name for name, tensor in sound.items() if not torch.equal(tensors[name], tensor)] == []


def test_a_folder_that_cannot_be_made(data, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Offload folder cannot be written") as caught:
        train(tiny(data, tmp_path, memory__offload_dir=tmp_path / "file" / "sub", **LAYERS, **DISK))
    assert "memory.offload_dir" in caught.value.problems[0].try_
