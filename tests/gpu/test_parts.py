"""`python -m benchmarks.gpu`: parts are cut off at their limit, keep what they had, and are not run twice."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.fp8_gpu import LAYERS, RATES, TOKENS, Products, StepShape
from benchmarks.gpu import AROUND_S, FP8_PARTS, GROUPS, LOSS, MEMORY_PARTS, PATHS_PARTS, Part, run_part, within
from benchmarks.gpu_targets import TARGETS
from tests.gpu import test_fp8_cuda, test_ops_cuda
from tilewright.ops.base.dispatch import Op
from tilewright.ops.int8_linear import INT8_LINEAR
from tilewright.ops.kernels import OPS

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


def test_all_fits_into_half_an_hour_most_of_it_worth_its_time():
    """Three calls of 9.2 minutes. The parts that decide come first, and fit even if each takes all of its limit."""
    call_s = 9.2 * 60
    assert sum(part.limit_s for part in FP8_PARTS[:4]) <= call_s
    assert [part.name for part in FP8_PARTS][:3] == ["tests_fp8", "fp8_gemm", "fp8_step"]
    assert sum(part.limit_s for part in MEMORY_PARTS[:3]) <= call_s
    assert sum(part.limit_s for part in PATHS_PARTS) <= call_s - GROUPS["loss"][0].least_s
    for call in (("fp8",), ("memory",), ("paths", "loss")):
        assert sum(len(GROUPS[group]) for group in call) <= 8, call  # files that come back from the device


def test_a_part_is_told_the_minutes_that_it_has():
    assert within(LOSS, 300)[-1] == f"{(300 - AROUND_S) / 60:.2f}"
    assert within(("-m", "other"), 300) == ("-m", "other")


def test_every_part_of_the_issue_has_a_target():
    """No target without a part; parts without one are there for comparison."""
    parts = {group: {part.name for part in parts} for group, parts in GROUPS.items()}
    judged = {group: {target.part for target in targets} for group, targets in TARGETS.items()}
    assert judged.keys() == parts.keys()
    assert not [name for group in parts for name in judged[group] - parts[group]]
    assert set().union(*parts.values()) - set().union(*judged.values()) == {"ops", "tiers", "throughput"}


def test_every_operation_is_tested_on_a_gpu():
    tested = {
        value.name for module in (test_fp8_cuda, test_ops_cuda) for value in vars(module).values()
        if isinstance(value, Op)
    }  # fmt: skip
    assert tested == {op.name for op in (*OPS, INT8_LINEAR)}


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
