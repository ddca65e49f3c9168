"""A CPU without 16-bit instructions multiplies in FP32 whatever the format: operations, recipes, foreign models."""

import os
import sys
from pathlib import Path

import pytest

from tests.ranks import fork_server

CASES = Path(__file__).with_name("without_16_bit.py")
RESTRICTED = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}


def restricted(marked, printed):
    """Run the cases in a process that has imported torch and has not computed: oneDNN and ATen read their variables
    when they first do (the cases begin with a test of it)."""
    os.environ.update(RESTRICTED)
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    options = ("-q", "-m", marked, "-p", "no:cacheprovider", "--durations=8")
    code = pytest.main([*options, str(CASES)])
    sys.stdout.flush()
    os._exit(code)


@pytest.mark.parametrize(
    ("marked", "seconds"),
    [("not slow", 280), pytest.param("slow", 3600, marks=[pytest.mark.slow, pytest.mark.timeout(3900)])],
)
def test_no_16_bit_matrix_reaches_torch(marked, seconds, tmp_path):
    """The slow ones compile, which takes minutes where other programs have the processors; a limit of minutes failed
    then, in the middle of the C++ compiler."""
    printed = tmp_path / "printed.txt"
    process = fork_server().Process(target=restricted, args=(marked, str(printed)))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    shown = printed.read_text() if printed.exists() else ""
    assert process.exitcode == 0, shown[-8000:]
    assert " passed" in shown
