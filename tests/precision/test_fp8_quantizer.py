"""FP8Quantizer: the bits of `formats`, the straight-through gradient, calibration, and errors that say why."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from tests.draws import examples
from tilewright import FP8Quantizer
from tilewright.core.errors import ConfigError
from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE, Tile
from tilewright.formats.spec import E4M3, E5M2, FP8_SPECS
from tilewright.formats.tiled import fp8_format
from tilewright.ops.base.compile import compile_options

TILES = {"tensor": TENSORWISE, "token": Tile(1, 0), "channel": Tile(1, 0), "tile": ROW_TILE, "block": BLOCK_TILE}
NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("spec", FP8_SPECS)
@pytest.mark.parametrize("granularity", TILES)
@given(rows=st.integers(0, 150), cols=st.integers(1, 300), seed=st.integers(0, 2**31), spread=st.integers(0, 30))
@examples(12)
def test_the_bits_are_those_of_the_products(granularity, spec, power_of_two, rows, cols, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp2(
        torch.randint(-spread, spread + 1, (rows, 1), generator=generator).float()
    )
    got = FP8Quantizer(spec=spec, granularity=granularity, power_of_two=power_of_two)(x)
    want = quantize(x, fp8_format(FP8_SPECS[spec], TILES[granularity], power_of_two=power_of_two)).dequantize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("spec", NUMPY)
def test_against_another_implementation(spec):
    """ml_dtypes rounds x / scale; a power of two makes the division exact."""
    x = torch.randn(1000) * 5
    scale = 2.0**-4
    got = FP8Quantizer(scale, spec=spec)(x)
    largest = FP8_SPECS[spec].max
    want = np.clip((x / scale).numpy(), -largest, largest).astype(NUMPY[spec]).astype(np.float32) * scale
    assert torch.equal(got, torch.from_numpy(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_keeps_shape_and_dtype(dtype):
    x = torch.randn(2, 3, 200).to(dtype)
    per_token = FP8Quantizer(granularity="token")(x)
    assert (per_token.shape, per_token.dtype) == (x.shape, dtype)
    assert torch.equal(per_token[1, 2], FP8Quantizer()(x[1, 2]))  # a token alone has the same scale
    weight = torch.randn(8, 3, 5, 5).to(dtype)
    assert torch.equal(FP8Quantizer(granularity="channel")(weight)[3], FP8Quantizer()(weight[3]))
    assert FP8Quantizer()(torch.tensor(3.3)).item() == 3.25
    assert FP8Quantizer()(torch.empty(0, 4)).shape == (0, 4)


def test_infinite_values_become_nan_and_harm_no_other():
    out = FP8Quantizer()(torch.tensor([1.0, math.inf, -2.0, math.nan]))
    assert out[[0, 2]].tolist() == [1.0, -2.0]
    assert out[[1, 3]].isnan().all()


# ---- gradient ----


def gradient(quantizer, x):
    x = x.clone().requires_grad_()
    quantizer(x).backward(torch.arange(1.0, x.numel() + 1).view(x.shape))
    return x.grad


def test_the_gradient_passes_inside_and_stops_where_clipped():
    x = torch.tensor([0.1, 448.0, 449.0, -1e6, 0.0, 1e-9])
    straight = torch.arange(1.0, 7.0)
    assert torch.equal(gradient(FP8Quantizer(1.0), x), straight * torch.tensor([1, 1, 0, 0, 1, 1]))
    assert torch.equal(gradient(FP8Quantizer(1.0, clip_gradient=False), x), straight)
    assert torch.equal(gradient(FP8Quantizer(), x), straight)  # its own scale clips nothing


@pytest.mark.parametrize("granularity", TILES)
def test_the_gradient_passes_for_every_granularity(granularity):
    x = torch.randn(130, 200)
    straight = torch.arange(1.0, x.numel() + 1).view(x.shape)
    assert torch.equal(gradient(FP8Quantizer(granularity=granularity), x), straight)


def test_compiled_is_the_same():
    x = torch.randn(7, 300)
    quantizer = FP8Quantizer(0.01, granularity="channel")
    compiled = torch.compile(quantizer, fullgraph=True, options=compile_options())
    assert torch.equal(gradient(compiled, x), gradient(quantizer, x))
    assert torch.equal(
        torch.compile(FP8Quantizer(granularity="token"), fullgraph=True, options=compile_options())(x),
        FP8Quantizer(granularity="token")(x),
    )


# ---- fixed scales ----


def test_calibration_takes_the_largest_of_the_batches():
    batches = [torch.randn(4, 8) * size for size in (1.0, 30.0, 2.0)]
    quantizer = FP8Quantizer(calibrate_batches=3)
    for batch in batches:
        assert quantizer.scale is None
        assert torch.equal(quantizer(batch), FP8Quantizer()(batch))  # meanwhile each by its own scale
    fixed = FP8Quantizer(quantizer.scale.item())
    later = torch.randn(4, 8) * 1000
    assert torch.equal(quantizer(later), fixed(later))
    assert quantizer(later).abs().max() == 448 * quantizer.scale.item()
    largest = max(batch.abs().max().item() for batch in batches)
    assert 0.5 * 448 * quantizer.scale.item() < largest <= 448 * quantizer.scale.item()
    quantizer.reset()
    assert torch.equal(quantizer(later), FP8Quantizer()(later))


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_a_calibrated_scale_travels_with_the_state(granularity):
    quantizer = FP8Quantizer(granularity=granularity, calibrate_batches=1, power_of_two=False)
    weight = torch.randn(200, 300)
    quantizer(weight)
    again = FP8Quantizer(granularity=granularity, calibrate_batches=1, power_of_two=False)
    again.load_state_dict(quantizer.state_dict())
    assert torch.equal(again(weight * 3), quantizer(weight * 3))
    assert again.scale is not None
    FP8Quantizer().load_state_dict(FP8Quantizer().state_dict())  # without one, too


def test_a_scale_for_each_channel():
    scales = torch.tensor([1.0, 0.5, 0.25])
    weight = torch.randn(3, 50) * 200
    got = FP8Quantizer(scales, granularity="channel")(weight)
    for row, scale in enumerate(scales.tolist()):
        assert torch.equal(got[row], FP8Quantizer(scale)(weight[row]))


# ---- training ----


@pytest.mark.parametrize("spec", FP8_SPECS)
def test_a_layer_learns_with_rounding_in_the_loop(spec):
    """Through 3 or 2 bits of mantissa: what is left is their rounding error, 1/16 or 1/8 at most of each weight."""
    torch.manual_seed(0)
    x, target = torch.randn(256, 16), torch.randn(16, 4)
    layer = nn.Linear(16, 4, bias=False)
    parametrize.register_parametrization(layer, "weight", FP8Quantizer(granularity="channel", spec=spec))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 200)
        loss = (layer(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 2 * (FP8_SPECS[spec].eps / 2) ** 2 * losses[0], (losses[0], losses[-1])


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({"scale": 0.1, "zero_point": 3}, "zero_point = 3"),
        ({"spec": "e3m4"}, "'e3m4'"),
        ({"granularity": "row"}, "'row'"),
        ({"scale": 0.0}, "0.0"),
        ({"scale": float("nan")}, "nan"),
        ({"scale": torch.tensor([1.0, -1.0]), "granularity": "channel"}, "-1."),
        ({"granularity": "token", "calibrate_batches": 2}, "calibrate_batches = 2"),
        ({"granularity": "tile", "scale": torch.ones(3)}, "a tensor of scales"),
    ],
)
def test_what_cannot_be_is_told(arguments, got):
    with pytest.raises(ConfigError) as error:
        FP8Quantizer(**arguments)
    (problem,) = error.value.problems
    assert got in problem.got
    assert all((problem.what, problem.need, problem.try_, problem.where))


def test_scales_of_another_tensor():
    with pytest.raises(ConfigError, match="does not fit the tensor") as error:
        FP8Quantizer(torch.ones(3), granularity="channel")(torch.ones(4, 8))
    assert "[4, 1]" in error.value.problems[0].need


def test_specs_by_name():
    assert FP8Quantizer(spec="e5m2").spec is E5M2
    assert FP8Quantizer().spec is E4M3
    assert "a scale a channel, scale fixed in 2 batches" in repr(
        FP8Quantizer(granularity="channel", calibrate_batches=2)
    )
