"""`python -m benchmarks.gpu`: parts are cut off at their limit, keep what they had, and are not run twice."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.fp8_gpu import LAYERS, RATES, TOKENS, Products, StepShape
from benchmarks.gpu import FP8_PARTS, GROUPS, Part, run_part

WRITE = "import os, pathlib; pathlib.Path(os.environ['OUT'], 'some.json').write_text('{\"done\": 1}')"


def test_what_a_part_wrote_and_printed():
    record = run_part(Part("some", (), 60, None), ("-c", f"{WRITE}; print('hello'); raise SystemExit(3)"), 60)
    assert (record["exit_code"], record["results"], record["output_tail"]) == (3, {"some": {"done": 1}}, "hello\n")


def test_a_part_that_hangs():
    """Its results so far are kept, and nothing of it lives on."""
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    record = run_part(Part("some", (), 60, None), ("-c", f"{WRITE}; {child}; time.sleep(99)"), 3)
    assert record["exit_code"] == "ended after 3 s"
    assert record["results"] == {"some": {"done": 1}}
    assert record["seconds"] < 30


def test_all_fits_into_ten_minutes_most_of_it_worth_its_time():
    """The parts that decide come first, and fit even if each takes all of its limit."""
    assert sum(part.limit_s for part in FP8_PARTS[:4]) <= 9.5 * 60
    assert [part.name for part in FP8_PARTS][:3] == ["tests_fp8", "fp8_gemm", "fp8_step"]
    for group, parts in GROUPS.items():
        assert len(parts) <= 8, group  # files that come back from the device
        assert parts[0].limit_s <= 9.5 * 60, group


def test_floors():
    """The rooflines, by hand."""
    floor = Products(TOKENS, *LAYERS[0]).floor()
    assert floor["flops"] == 6 * 16384 * 4096 * 16384
    assert floor["bf16_floor_ms"] == pytest.approx(8.351, abs=1e-3)
    assert floor["fp8_floor_ms"] == pytest.approx(1e3 * (floor["flops"] / 1500e12 + floor["quantise_bytes"] / 4.3e12))
    step = StepShape(layers=1, rows=1, seq=1024)
    weights = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    assert step.roofline()["linear_flops"] == 6 * 1024 * weights
    assert step.roofline()["attention_flops"] == 3.5 * 2 * 1024**2 * 4096
    copies = 6 * 4096 + 2 * 1024 + 3 * 14336  # elements per token: x of qkv, o, gate and up, down; dy of all seven
    assert step.roofline()["quantise_ms"] == pytest.approx(1e3 * 4 * 1024 * copies / RATES["bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_dry_run(group, tmp_path):
    """Every part with a small form runs end to end on a CPU, with the kernels interpreted, and is not run again."""
    env = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", group, "--tiny"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    for part in GROUPS[group]:
        if part.tiny is not None:
            record = json.loads((tmp_path / f"{part.name}.json").read_text())
            assert record["exit_code"] == 0
            assert record["tiny"]
            assert '"error"' not in json.dumps(record["results"]), part.name
    again = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "exit code" not in again.stdout
