"""Scales of four bits: not above llama.cpp's own rule in any group, at any magnitude, and nothing lost that FP16
holds."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.compress.quantize.least_error import round_to_least_error
from tilewright.formats.integer import INT4, IntSpec, half_scale, quantize_integer
from tilewright.formats.scaling import Tile

GROUP = 32
SMALLEST_HALF = 2.0**-24
"""The smallest positive number of FP16."""


@st.composite
def groups(draw, lowest=-30, highest=30):
    """Rows of groups of 32, each with a magnitude of its own between 10^lowest and 10^highest."""
    draws = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows, count = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["normal", "laplace", "uniform", "one", "outlier"]))
    x = {
        "normal": draws.normal(size=(rows, count, GROUP)),
        "laplace": draws.laplace(size=(rows, count, GROUP)),
        "uniform": draws.uniform(-1, 1, size=(rows, count, GROUP)),
        "one": np.where(np.arange(GROUP) == 3, 1.0, 0.0) * draws.choice([-1, 1], size=(rows, count, 1)),
        "outlier": draws.normal(size=(rows, count, GROUP)) * np.where(np.arange(GROUP) == 5, 20.0, 1.0),
    }[kind]
    x = x * 10.0 ** draws.uniform(lowest, highest, size=(rows, count, 1))
    x[draws.random((rows, count)) < 0.1] = 0.0
    return torch.from_numpy(x.reshape(rows, -1).astype(np.float32))


def errors(x_MK, rounded_MK):
    """Squared error of each group over the square of its largest value, in FP64."""
    x, rounded = (t.double().numpy().reshape(len(x_MK), -1, GROUP) for t in (x_MK, rounded_MK))
    largest = np.abs(x).max(2, keepdims=True)
    return (((rounded - x) / np.where(largest, largest, 1.0)) ** 2).sum(2)


def llama_cpp(x_MK):
    """Q4_0's own rule: the value of the largest magnitude gets the code -8. The scale is stored in FP16."""
    x = x_MK.double().numpy().reshape(len(x_MK), -1, GROUP)
    largest = np.take_along_axis(x, np.abs(x).argmax(2)[:, :, None], 2)
    scale = largest / -8
    codes = np.clip(np.floor(x * np.where(scale, 1 / np.where(scale, scale, 1.0), 0.0) + 8.5), 0, 15) - 8
    with np.errstate(over="ignore", invalid="ignore"):
        values = codes * scale.astype(np.float16).astype(np.float64)
    return torch.from_numpy(values.reshape(x_MK.shape))


ROUNDING = 1 + 2.0**-16
"""Errors are compared in FP64; ours was chosen by sums of 32 squares in FP32 of numbers up to one."""


@examples(150)
@given(groups())
def test_no_group_loses_more_than_by_the_rule_of_llama_cpp(x):
    found = round_to_least_error(x, INT4, Tile(1, GROUP), half=True, negative=True)
    assert torch.equal(found.scale, half_scale(found.scale)), "a scale that FP16 does not hold"
    assert found.dequantize().isfinite().all()
    ours, theirs = errors(x, found.dequantize()), errors(x, llama_cpp(x))
    theirs = np.where(np.isfinite(theirs), theirs, np.inf)
    worst = (ours - theirs * ROUNDING).max()
    assert worst <= 1e-7, (
        f"a group's error is {worst:.3g} above llama.cpp's {theirs.flat[(ours - theirs).argmax()]:.3g}"
    )


@examples(150)
@given(groups(), st.booleans())
def test_no_group_loses_more_than_by_its_range(x, half):
    found = round_to_least_error(x, INT4, Tile(1, GROUP), half=half)
    assert (found.scale > 0).all()
    plain = quantize_integer(x, INT4, Tile(1, GROUP))
    bound = errors(x, plain.dequantize())
    if half:  # by the nearest scale of FP16 a value may be off by 2^-11 of itself beside the rounding
        bound = (np.sqrt(bound) + np.sqrt(GROUP) * 2.0**-10) ** 2
        held = x.reshape(len(x), -1, GROUP).abs().amax(2).numpy()
        bound = np.where((held > 2.0**-14 * 7) & (held < 65504 * 7), bound, np.inf)
    assert (errors(x, found.dequantize()) <= bound * ROUNDING + 1e-7).all()


@examples(100)
@given(groups(lowest=-7.5, highest=4), st.booleans())
def test_small_groups_are_not_lost(x, negative):
    """A step of FP16's smallest number, or an eighth of the group: an element is off by half of the larger, and a
    whole one where seven steps must reach."""
    found = round_to_least_error(x, INT4, Tile(1, GROUP), half=True, negative=negative)
    largest = x.reshape(len(x), -1, GROUP).abs().amax(2, keepdim=True).double()
    step = (largest / 7).clamp(min=2.0**-14) * 2.0**-10 + largest / 7 + SMALLEST_HALF
    bound = (GROUP * (step / 2) ** 2 / largest.clamp(min=1e-300) ** 2).squeeze(2).numpy()
    assert (errors(x, found.dequantize()) <= bound).all()


def test_the_mean_error_is_below_that_of_llama_cpp():
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(400, 8 * GROUP)).astype(np.float32))
    theirs = errors(x, llama_cpp(x)).mean()
    ours = {
        negative: errors(x, round_to_least_error(x, INT4, Tile(1, GROUP), half=True, negative=negative).dequantize())
        for negative in (True, False)
    }
    shares = {negative: error.mean() / theirs for negative, error in ours.items()}
    print(shares)
    assert shares[True] < 0.92  # 0.887 measured
    assert shares[False] < 1.03  # 1.00 measured: XNNPACK takes no negative scale


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("cols", [1, 31, 32, 33, 70])
def test_any_width_and_groups_that_do_not_divide(bits, cols):
    x = torch.randn(5, cols, generator=torch.Generator().manual_seed(0))
    found = round_to_least_error(x, IntSpec(bits), Tile(1, GROUP))
    assert found.scale.shape == (5, -(-cols // GROUP))
    plain = quantize_integer(x, IntSpec(bits), Tile(1, GROUP)).dequantize()
    assert (found.dequantize() - x).square().sum() <= (plain - x).square().sum() * ROUNDING


def test_zeros_infinities_and_nothing():
    x = torch.zeros(3, 2 * GROUP)
    x[1, 3], x[2, 40] = torch.inf, torch.nan
    found = round_to_least_error(x, INT4, Tile(1, GROUP), half=True, negative=True)
    assert found.scale.isnan().tolist() == [[False, False], [True, False], [False, True]]
    assert (found.dequantize()[0] == 0).all()
    assert round_to_least_error(torch.empty(0, 64), INT4, Tile(1, GROUP)).shape == (0, 64)


@given(st.floats(-1e6, 1e6, width=32, allow_subnormal=True))
@examples(300)
def test_half_scales_are_numbers_of_fp16(value):
    found = half_scale(torch.tensor([value])).item()
    assert found == float(np.float16(found))
    assert found != 0
    assert (found < 0) == (np.copysign(1.0, value) < 0)
    size = abs(value)
    if 2.0**-14 <= size <= 65504:
        assert found == float(np.float16(value)), "the nearest"
    elif size < 2.0**-14:
        assert max(size, SMALLEST_HALF) <= abs(found) <= max(size + SMALLEST_HALF, SMALLEST_HALF), "the next above"
    else:
        assert abs(found) == 65504
