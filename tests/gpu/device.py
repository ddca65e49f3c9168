"""Where the tests of this folder run: on a CUDA device; or, asked by GPU_TESTS_ON=cpu, on the CPU, to try the tests
themselves: Triton's kernels in its interpreter, small sizes, few examples."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tilewright.core.hardware import detect_machine
from tilewright.ops.base.dispatch import Candidate, Case, Op

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TRIED = os.environ.get("GPU_TESTS_ON") == "cpu"
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device")]
ON_A_GPU_OR_TRIED = [pytest.mark.gpu, pytest.mark.skipif(not CUDA and not TRIED, reason="no CUDA device")]
MOST = 700 if CUDA else 200
"""Rows and columns."""
MANY = settings(
    max_examples=60 if CUDA else 4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
POISON_BYTES = (32 * 2**20, 2**20, 4096, 512)


def names(op: Op):
    """A test for each candidate."""
    return pytest.mark.parametrize("name", [candidate.name for candidate in op.candidates])


def find(op: Op, name: str, dtype: torch.dtype, kind: str = "") -> Candidate:
    """A candidate that runs here; the test is skipped with its reason where it does not."""
    candidate = next(candidate for candidate in op.candidates if candidate.name == name)
    reason = candidate.why_not(detect_machine(DEVICE), Case(DEVICE, dtype, kind))
    if reason and (CUDA or name != "triton"):
        pytest.skip(reason)
    if name == "compiled" and not CUDA:
        pytest.skip("compiled for a CPU in tests/ops")
    return candidate


def run_poisoned(op: Op, name: str, dtype: torch.dtype, kind: str = ""):
    """The candidate's function, in memory that was filled with ones (NaN as codes and as floats) before: what is not
    written shows."""
    candidate = find(op, name, dtype, kind)

    def run(*args, **options):
        poison()
        return candidate.run(*args, **options)

    return run


def poison() -> None:
    """Fill blocks of memory and free them: what is allocated next is made of them."""
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE) for size in POISON_BYTES]
    del blocks
