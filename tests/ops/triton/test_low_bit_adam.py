"""The Triton AdamW with 8-bit moments, in the interpreter, against the law: bit for bit."""

from dataclasses import replace

import pytest
import torch

from tests.cover import covering
from tests.ops.low_bit import HALF, KINDS, ROWS, SIZES, LowBitCase, assert_same, hyper, written_masters, written_pairs
from tilewright.ops.backends.ref.low_bit_adam import low_bit_adam as law
from tilewright.ops.backends.triton import launch
from tilewright.ops.backends.triton.low_bit_adam import low_bit_adam

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="these run the interpreter; tests/gpu runs the kernels")


@pytest.mark.parametrize(("kind", "size"), covering(KINDS, SIZES, pairs=False))
def test_bits_of_the_law(kind, size):
    case = LowBitCase(kind, size)
    ours, want = case.tensors(), case.tensors()
    for step, grad in enumerate(case.grads(3), 1):
        low_bit_adam(replace(ours, grad=grad), hyper(step))
        law(replace(want, grad=grad), hyper(step))
        assert_same(ours, want, f"{case}, step {step}")


@pytest.mark.parametrize(("kind", "rows"), covering(KINDS, ROWS, pairs=False))
def test_bits_of_the_law_in_rows(kind, rows):
    case = LowBitCase(kind, rows[0] * rows[1], rows=rows[0])
    ours, want = case.tensors(), case.tensors()
    for step, grad in enumerate(case.grads(2), 1):
        low_bit_adam(replace(ours, grad=grad, first=10**9 + 7), hyper(step))
        law(replace(want, grad=grad, first=10**9 + 7), hyper(step))
        assert_same(ours, want, f"{case}, step {step}")


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_awkward(kind):
    case = LowBitCase(kind, 128 * 8)
    ours, want = case.tensors(), case.tensors()
    for step, grad in enumerate(case.awkward_grads(4), 1):
        low_bit_adam(replace(ours, grad=grad), hyper(step))
        law(replace(want, grad=grad), hyper(step))
        assert_same(ours, want, f"{case}, step {step}")


@pytest.mark.parametrize("low", [-128, 0, 127])
def test_weights_that_were_written(low):
    ours, want = written_pairs(low), written_pairs(low)
    low_bit_adam(ours, hyper(1, lr=0.0))
    law(want, hyper(1, lr=0.0))
    assert_same(ours, want)


@pytest.mark.parametrize("kind", HALF)
def test_masters_whose_weights_were_written(kind):
    ours, want = written_masters(kind, every=11), written_masters(kind, every=11)
    low_bit_adam(ours, hyper(1, lr=0.0))
    law(want, hyper(1, lr=0.0))
    assert_same(ours, want)


def test_nothing():
    low_bit_adam(replace(LowBitCase("split24", 0).tensors(), grad=torch.empty(0)), hyper(1))
