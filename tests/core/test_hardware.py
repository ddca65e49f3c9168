"""Facts of the machine: read right from the files of the system, and an error that says why there is no GPU."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from tilewright.core import hardware
from tilewright.core.errors import HardwareError
from tilewright.core.hardware import cpu_features, cpu_limits, detect_machine, find_cxx_compiler, fp8_choice


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
    assert cpu_features(x86, {}) == {"avx2", "amx_bf16", "avx512_bf16"}
    arm = tmp_path / "arm"
    arm.write_text("processor : 0\nFeatures : fp asimd bf16 sve\n")
    assert cpu_features(arm, {}) == {"asimd", "bf16", "sve"}
    assert cpu_features(tmp_path / "nothing") == frozenset()


SAPPHIRE = (
    "fma f16c sse4_1 avx avx2 avx512f avx512bw avx512vbmi avx_vnni avx512_vnni avx512_bf16 avx512_fp16 amx_tile "
    "amx_int8 amx_bf16"
)
VECTORS = {"fma", "f16c", "sse4_1", "avx", "avx2", "avx512f", "avx512bw", "avx512vbmi"}
LIMITS = {  # what oneDNN's documentation says that a value leaves of matmul instructions
    "AVX2": "", "avx2": "", "SSE41": "", "AVX512_CORE": "", "AVX2_VNNI": "avx_vnni", "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE_BF16": "avx512_vnni avx512_bf16",
    "AVX10_1_512": "avx_vnni avx512_vnni avx512_bf16 avx512_fp16",
    "AVX512_CORE_FP16": "avx_vnni avx512_vnni avx512_bf16 avx512_fp16",
    "AVX512_CORE_AMX": "avx_vnni avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16",
    "DEFAULT": "avx_vnni avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16",
}  # fmt: skip


def _sapphire(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags : fpu {SAPPHIRE}\n")
    return cpuinfo


@pytest.mark.parametrize("value", LIMITS)
@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_matmul_instructions_are_those_that_onednn_may_use(tmp_path, name, value):
    found = cpu_features(_sapphire(tmp_path), {name: value})
    assert found == VECTORS | set(LIMITS[value].split())
    assert cpu_limits(_sapphire(tmp_path), {name: value}) == (
        () if len(found) == len(SAPPHIRE.split()) else (f"{name}={value.lower()}",)
    )


def test_vectors_are_those_that_aten_may_use(tmp_path):
    cpuinfo, everything = _sapphire(tmp_path), set(SAPPHIRE.split())
    of_aten = {
        value: everything - cpu_features(cpuinfo, {"ATEN_CPU_CAPABILITY": value})
        for value in ("default", "avx2", "avx512", "AVX2", "")  # ATen takes no capitals
    }
    avx512 = {"avx512f", "avx512bw", "avx512vbmi"}
    assert of_aten == {
        "default": avx512 | {"fma", "f16c", "avx", "avx2"},
        "avx2": avx512,
        "avx512": set(),
        "AVX2": set(),
        "": set(),
    }
    both = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    assert cpu_features(cpuinfo, both) == {"fma", "f16c", "sse4_1", "avx", "avx2"}
    assert cpu_limits(cpuinfo, both) == ("ONEDNN_MAX_CPU_ISA=avx2", "ATEN_CPU_CAPABILITY=avx2")


def test_what_onednn_and_aten_ignore_limits_nothing(tmp_path):
    ignored = {"ONEDNN_MAX_CPU_ISA": "AVX512_MIC", "DNNL_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "sse"}
    assert cpu_features(_sapphire(tmp_path), ignored) == set(SAPPHIRE.split())
    assert cpu_limits(_sapphire(tmp_path), ignored) == ()


def test_a_cpu_without_more_is_not_limited(tmp_path):
    bare = tmp_path / "bare"
    bare.write_text("flags : avx avx2 fma\n")
    both = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    assert cpu_features(bare, both) == {"avx", "avx2", "fma"}
    assert cpu_limits(bare, both) == ()


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
