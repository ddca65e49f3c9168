"""Facts of the machine: read right from the files of the system, and an error that says why there is no GPU."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from tilewright.core import hardware
from tilewright.core.errors import HardwareError
from tilewright.core.hardware import cpu_features, detect_machine, find_cxx_compiler, fp8_choice


def test_this_machine_is_plausible_and_goes_into_json():
    machine = detect_machine("cpu")
    assert machine.device == "cpu"
    assert machine.capability is None
    assert machine.device_memory_bytes == machine.host_memory_bytes > 2**28
    assert 1 <= machine.physical_cores <= 1024
    assert torch.__version__.startswith(machine.versions["torch"])  # of the package: with or without "+cu130"
    assert json.loads(json.dumps(machine.to_json()))["cpu_features"] == sorted(machine.cpu_features)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_that_is_not_there_says_why():
    with pytest.raises(HardwareError) as caught:
        detect_machine("cuda")
    (problem,) = caught.value.problems
    assert torch.__version__ in problem.got
    assert "cpu" in problem.try_
    assert caught.value.exit_code == 5


def test_cpu_features_of_x86_and_arm(tmp_path):
    x86 = tmp_path / "x86"
    x86.write_text("processor : 0\nmodel name : X\nflags : fpu avx2 amx_bf16 smep avx512_bf16\n")
    assert cpu_features(x86) == {"avx2", "amx_bf16", "avx512_bf16"}
    arm = tmp_path / "arm"
    arm.write_text("processor : 0\nFeatures : fp asimd bf16 sve\n")
    assert cpu_features(arm) == {"asimd", "bf16", "sve"}
    assert cpu_features(tmp_path / "nothing") == frozenset()


def test_the_compiler_that_cxx_names_and_no_other(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert find_cxx_compiler() is None
    monkeypatch.delenv("CXX")
    first = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    assert find_cxx_compiler() == first


def test_cgroup_limits_count(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(hardware, "_cgroup_dirs", lambda: [tmp_path])
    assert hardware._host_memory_bytes() == 1_000_000
    assert hardware._physical_cores() == 1
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert hardware._host_memory_bytes() > 1_000_000


@pytest.mark.parametrize(
    ("capability", "mode", "native"),
    [
        (None, "hybrid_fp16", ()),
        ((7, 5), "hybrid_fp16", ()),
        ((8, 0), "hybrid_fp16", ()),
        ((8, 6), "hybrid_fp16", ()),
        ((8, 9), "hybrid_fp16", ("fp8_tensorwise",)),
        ((9, 0), "full_fp8", ("fp8_tile", "fp8_hybrid", "fp8_tensorwise")),
        ((10, 0), "full_fp8", ("fp8_tensorwise",)),
        ((12, 0), "full_fp8", ("fp8_tensorwise",)),
    ],
)
def test_what_8_bit_training_means_on_a_machine(capability, mode, native):
    """full_fp8 from 9.0 on, as the article has it; which matmuls the unit runs is reported exactly."""
    device = "cpu" if capability is None else "cuda"
    choice = fp8_choice(replace(detect_machine("cpu"), device=device, capability=capability))
    assert (choice.mode, choice.native) == (mode, native)
    wanted = "CPU" if capability is None else f"capability {capability[0]}.{capability[1]}"
    assert wanted in choice.reason
