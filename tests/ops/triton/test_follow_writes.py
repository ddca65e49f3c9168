"""The Triton kernel of masters that follow writes, in the interpreter, against its definition: bit for bit."""

import pytest

from tests.ops.follow import DTYPES, SHAPES, pair, same_bits
from tilewright.ops.backends.triton import launch
from tilewright.ops.backends.triton.follow_writes import follow_writes

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="these run the interpreter; tests/gpu runs the kernels")


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_definition(dtype, shape):
    for share in (0.0, 0.01, 1.0):
        master, weight, want = pair(dtype, shape, share)
        follow_writes(master, weight)
        assert same_bits(master, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_that_the_kernel_does_not_take(dtype):
    master, weight, want = pair(dtype, (9, 70), 0.1)
    master, weight = (x.mT.contiguous().mT for x in (master, weight))
    follow_writes(master, weight)
    assert same_bits(master.contiguous(), want)
