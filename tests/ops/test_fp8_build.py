"""Building and loading the C++ kernels: what can go wrong is a reason, and there is one pool of threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewright.core.hardware import detect_machine
from tilewright.ops.backends.cpu import build
from tilewright.ops.backends.cpu.build import FP8, LOW_BIT_ADAM, BuildError
from tilewright.ops.base.dispatch import Case
from tilewright.ops.kernels import Kernels

MACHINE = detect_machine("cpu")
CASE = Case("cpu", torch.bfloat16)
needs_compiler = pytest.mark.skipif(MACHINE.cxx_compiler is None, reason="no C++ compiler here")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_others_run_and_it_is_told():
    kernels, told = Kernels(replace(MACHINE, cxx_compiler=None)), []
    for row in kernels.explain():
        if "quantize" in row["op"] or row["op"] == "tile_gemm":
            assert row["chosen"] in ("ref", "dequant")
            if not dict(row["rejected"])["cpu"].startswith("knows "):  # formats that it has with no compiler
                told.append(row["op"])
                assert "no C++ compiler" in dict(row["rejected"])["cpu"]
    assert {"quantize", "tile_gemm"} <= set(told), told


def test_a_compiler_that_fails_is_a_reason(tmp_path):
    broken = script(
        tmp_path / "c++", 'case "$1" in --version) echo 1.0;; *) echo "fp8.cpp:1: error: no" >&2; exit 1;; esac'
    )
    assert FP8.why_not(replace(MACHINE, cxx_compiler=broken), CASE) == "c++ could not build it: fp8.cpp:1: error: no"
    absent = str(tmp_path / "none")
    assert "did not run" in FP8.why_not(replace(MACHINE, cxx_compiler=absent), CASE)


def test_what_is_not_a_library_is_a_reason(tmp_path):
    odd = tmp_path / "fp8.so"
    odd.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="does not load"):
        build.load(FP8, odd)


def test_other_devices_are_left_alone():
    assert FP8.why_not(MACHINE, Case("cuda", torch.bfloat16)) == "it runs on CPUs only"


@needs_compiler
def test_a_folder_that_cannot_be_made_is_a_reason(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="cannot be written to"):
        build.build(FP8, MACHINE.cxx_compiler, tmp_path / "file" / "kernels")


@pytest.fixture
def _quick(monkeypatch):
    """Code that nobody runs is compiled as fast as it goes."""
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))


@needs_compiler
@pytest.mark.usefixtures("_quick")
def test_built_once_also_by_two_at_once(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.build(LOW_BIT_ADAM, MACHINE.cxx_compiler, tmp_path), range(2))
    assert first == second
    assert list(tmp_path.iterdir()) == [first]
    written = first.stat().st_mtime_ns
    assert build.build(LOW_BIT_ADAM, MACHINE.cxx_compiler, tmp_path).stat().st_mtime_ns == written


@needs_compiler
@pytest.mark.usefixtures("_quick")
def test_another_compiler_version_is_another_file(tmp_path):
    first = build.build(LOW_BIT_ADAM, MACHINE.cxx_compiler, tmp_path / "kernels")
    newer = script(tmp_path / "c++", f'case "$1" in --version) echo 99;; *) exec {MACHINE.cxx_compiler} "$@";; esac')
    assert build.build(LOW_BIT_ADAM, newer, tmp_path / "kernels") != first


@needs_compiler
def test_one_openmp_runtime_and_torch_s_number_of_threads():
    code = (
        "import os, torch\n"
        "from tilewright.formats.scaling import ROW_TILE\n"
        "from tilewright.formats.spec import E4M3\n"
        "from tilewright.ops.backends.cpu import build, fp8\n"
        "torch.set_num_threads(3)\n"
        "x = torch.randn(1024, 1024, dtype=torch.bfloat16)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "fp8.quantize(x, E4M3, ROW_TILE)\n"
        "made = len(os.listdir('/proc/self/task')) - before\n"
        "torch.set_num_threads(1)\n"
        "names = {l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l.rsplit('/', 1)[-1]}\n"
        "print(made, len(names), build.openmp_path() in names)\n"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc here")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    made, runtimes, known = done.stdout.split()
    assert (runtimes, known) == ("1", "True")
    assert int(made) in (0, 2)  # 0: torch.randn has started them before
