"""GPTQ against an independent float64 form, and AWQ's folding: exact before rounding, better after."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.draws import examples
from tilewright.compress.quantize.awq import best_scale, fold
from tilewright.compress.quantize.gptq import DAMPING, gptq, output_error
from tilewright.formats.integer import INT4, INT8, quantize_integer
from tilewright.formats.scaling import Tile


def correlated(tokens, features, seed):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=generator, dtype=torch.float64)
    mix = mix * torch.logspace(0, -1.5, features, dtype=torch.float64)[:, None]
    return torch.randn(tokens, features, generator=generator, dtype=torch.float64) @ mix


def plain_gptq(weight, hessian, spec, group):
    """Optimal brain quantisation in fixed order, by a fresh inverse of what is left at each column: numpy, float64."""
    weight, hessian = weight.double().numpy().copy(), hessian.numpy().copy()
    num_in = weight.shape[1]
    hessian += np.eye(num_in) * DAMPING * np.mean(np.diag(hessian))
    codes, steps = np.zeros(weight.shape, dtype=int), np.zeros(weight.shape)
    for k in range(num_in):
        inverse = np.linalg.inv(hessian[k:, k:])
        if k % group == 0:
            part = weight[:, k : k + group].astype(np.float32)
            high, low = np.maximum(part.max(1), 0), np.minimum(part.min(1), 0)
            scale = np.maximum(high / np.float32(spec.highest), low / np.float32(spec.lowest))
            scale = np.maximum(scale, np.float32(2.0**-126)).astype(float)
        steps[:, k] = weight[:, k] / scale
        codes[:, k] = np.clip(np.round(steps[:, k]), spec.lowest, spec.highest)
        error = (weight[:, k] - codes[:, k] * scale) / inverse[0, 0]
        weight[:, k:] -= np.outer(error, inverse[0])
    return codes, steps


@examples(25)
@given(
    st.integers(1, 6),
    st.sampled_from([1, 5, 16, 40, 150, 260]),
    st.sampled_from([4, 16, 100, 1000]),
    st.sampled_from([INT4, INT8]),
    st.integers(0, 2**31),
)
def test_codes_equal_an_independent_implementation(rows, cols, group, spec, seed):
    x = correlated(2 * cols + 3, cols, seed)
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    tile = Tile(1, group if group < cols else 0)
    got = gptq(weight, x.T @ x, spec, tile)
    want, steps = plain_gptq(weight, x.T @ x, spec, group if group < cols else cols)
    different = got.codes.numpy() != want
    first = different.any(0).argmax() if different.any() else None  # after a tie the ways part
    if first is not None:
        fraction = np.abs(steps[different[:, first], first] % 1 - 0.5)
        assert (fraction < 1e-4).all(), f"column {first}: {steps[different[:, first], first]}"


@examples(25)
@given(st.integers(1, 12), st.sampled_from([16, 33, 64]), st.sampled_from([0, 16, 7]), st.integers(0, 2**31))
def test_output_error_on_correlated_inputs_is_below_that_of_rounding(rows, cols, group, seed):
    x = correlated(4 * cols, cols, seed)
    hessian = x.T @ x
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed + 1))
    rounded = quantize_integer(weight, INT4, Tile(1, group)).dequantize()
    found = gptq(weight, hessian, INT4, Tile(1, group)).dequantize()
    direct = float(((weight.double() - found.double()) @ x.T).square().sum())
    assert output_error(weight, found, hessian) == pytest.approx(direct, rel=1e-9)
    assert output_error(weight, found, hessian) <= output_error(weight, rounded, hessian)


@pytest.mark.parametrize("symmetric", [True, False])
def test_inputs_that_say_nothing_give_plain_rounding(symmetric):
    weight = torch.randn(5, 40)
    want = quantize_integer(weight, INT4, Tile(1, 16), symmetric=symmetric)
    for hessian in (torch.zeros(40, 40), torch.eye(40)):
        got = gptq(weight, hessian, INT4, Tile(1, 16), symmetric=symmetric)
        assert torch.equal(got.scale, want.scale)
        assert torch.equal(got.codes, want.codes)


def test_rows_and_inputs_of_zeros():
    x = correlated(64, 16, 0)
    x[:, 3] = 0
    weight = torch.randn(4, 16)
    weight[2] = 0
    got = gptq(weight, x.T @ x, INT4, Tile(1, 5)).dequantize()
    assert got.isfinite().all()
    assert (got[2] == 0).all()
    assert gptq(torch.empty(0, 4), torch.eye(4), INT4, Tile(1, 2)).shape == (0, 4)


# ---- AWQ ----


def in_groups(weight):
    return quantize_integer(weight, INT4, Tile(1, 32))


def in_rows(weight):
    return quantize_integer(weight, INT4, Tile(1, 0))


def with_outliers(seed=0, features=64):
    x = torch.randn(512, features, generator=torch.Generator().manual_seed(seed))
    x[:, :3] *= 40
    return x


@pytest.mark.parametrize("norm", [nn.RMSNorm(64), nn.LayerNorm(64)], ids=["rms", "layer"])
def test_folding_leaves_the_function_as_it_is(norm):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 8), nn.Linear(64, 16)]
    nn.init.normal_(norm.weight)
    x = torch.randn(5, 64)
    model = [nn.Sequential(norm, layer).double() for layer in layers]
    before = [part(x.double()) for part in model]
    fold(norm, layers, torch.rand(64) * 10 + 0.1)
    for part, want in zip(model, before, strict=True):
        torch.testing.assert_close(part(x.double()), want, rtol=1e-12, atol=1e-12)


def test_scaling_is_better_than_rounding_on_outlier_channels_and_never_worse():
    torch.manual_seed(0)
    x = with_outliers()
    hessian = x.double().T @ x.double()
    weights = [torch.randn(32, 64), torch.randn(16, 64)]
    scale = best_scale(weights, x.abs().mean(0), hessian, in_groups)

    def error(scale):
        rounded = [quantize_integer(w * scale, INT4, Tile(1, 32)).dequantize() / scale for w in weights]
        return sum(output_error(w, q, hessian) for w, q in zip(weights, rounded, strict=True))

    assert error(scale) < 0.5 * error(torch.ones(64))
    white = torch.randn(512, 64)
    hessian = white.double().T @ white.double()
    scale = best_scale(weights, white.abs().mean(0), hessian, in_groups)
    assert error(scale) <= error(torch.ones(64))


def test_channels_that_are_always_zero():
    x = with_outliers()
    x[:, 5] = 0
    scale = best_scale([torch.randn(4, 64)], x.abs().mean(0), x.double().T @ x.double(), in_rows)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    zero = torch.zeros(64)
    assert torch.equal(best_scale([torch.randn(4, 64)], zero, torch.zeros(64, 64), in_rows), torch.ones(64))
