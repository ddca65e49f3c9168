"""A CPU without 16-bit instructions multiplies in FP32 whatever the format: operations, recipes, foreign models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("without_16_bit.py")
RESTRICTED = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.mark.parametrize(
    ("marked", "seconds"),
    [("not slow", 280), pytest.param("slow", 3600, marks=[pytest.mark.slow, pytest.mark.timeout(3900)])],
)
def test_no_16_bit_matrix_reaches_torch(marked, seconds):
    """In a process of its own: oneDNN and ATen read their variables once. The slow ones compile, which takes minutes
    where other programs have the processors; a limit of minutes failed then, in the middle of the C++ compiler."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        marked,
        "-p",
        "no:cacheprovider",
        "--durations=8",
        str(CASES),
    ]
    environ = os.environ | RESTRICTED | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environ)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
