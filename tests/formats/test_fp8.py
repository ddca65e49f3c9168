"""8-bit codes, scales and tiles against exact arithmetic, torch's own 8-bit dtypes and ml_dtypes."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.formats.encode import NAN_CODE, decode, decode_e8m0, encode
from tilewright.formats.quant_error import measure, sqnr_db
from tilewright.formats.quantize import noise_like, quantize
from tilewright.formats.scaling import (
    BLOCK_TILE,
    COLUMN_TILE,
    ROW_TILE,
    TENSORWISE,
    Tile,
    encode_scale_of,
    exponent_range,
    scale_inv_of,
    tile_amax,
)
from tilewright.formats.spec import BF16, E4M3, E5M2, FP8_SPECS, FP16, FP32
from tilewright.formats.tiled import FP8_ROW, TiledTensor, fp8_format

EVERY_CODE = torch.arange(256, dtype=torch.uint8)
SPECS = pytest.mark.parametrize("spec", FP8_SPECS.values(), ids=lambda spec: spec.name)
TILES = (ROW_TILE, COLUMN_TILE, BLOCK_TILE, TENSORWISE, Tile(1, 0))
NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()


@SPECS
def test_limits_equal_finfo(spec):
    info = torch.finfo(spec.dtype)
    assert (spec.max, spec.tiny, spec.eps) == (info.max, info.tiny, info.eps)
    assert spec.smallest == info.smallest_normal * info.eps


@SPECS
def test_every_code_decodes_as_torch_does(spec):
    ours, theirs = decode(EVERY_CODE, spec), EVERY_CODE.view(spec.dtype).float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(7.0).view(torch.int32), theirs.nan_to_num(7.0).view(torch.int32))  # signs too


@SPECS
def test_every_code_survives(spec):
    values = decode(EVERY_CODE, spec)
    finite = values.isfinite()
    assert torch.equal(encode(values, spec)[finite], EVERY_CODE[finite])
    assert set(encode(values, spec)[~finite].tolist()) == {NAN_CODE}  # the negative ones too


@SPECS
def test_every_bf16_and_fp16_rounds_to_nearest_even(spec):
    values = torch.cat([every_bf16(), torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()])
    inside = values.abs() <= spec.max
    expected = torch.from_numpy(values[inside].numpy().astype(NUMPY[spec.name]).view(np.uint8))
    assert torch.equal(encode(values[inside], spec), expected)
    beyond = values[values.isfinite() & ~inside]
    assert torch.equal(decode(encode(beyond, spec), spec), beyond.sign() * spec.max)


@examples(300)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(list(FP8_SPECS.values())))
def test_nearest_value_by_exact_arithmetic(value, spec):
    qdata = [code for code in range(256) if (code & 0x7F) <= (0x7E if spec is E4M3 else 0x7B)]
    exact = Fraction(value)
    got = Fraction(decode(encode(torch.tensor([value]), spec), spec).item())
    nearest = min(abs(Fraction(v) - exact) for v in decode(torch.tensor(qdata, dtype=torch.uint8), spec).tolist())
    assert abs(got - exact) == nearest
    assert math.copysign(1, float(decode(encode(torch.tensor([value]), spec), spec))) == math.copysign(1, value)


@SPECS
@pytest.mark.parametrize("value", [0.3, 17.3, -1.06, 3e-3, -1e-3, 2.0**-10], ids=str)
def test_stochastic_rounding_is_right_on_average(spec, value):
    x = torch.full((200_000,), value)
    rounded = decode(encode(x, spec, noise_like(x, torch.Generator().manual_seed(0))), spec).double()
    low, high = rounded.min(), rounded.max()
    assert low <= value <= high
    step = float(high - low)
    assert abs(float(rounded.mean()) - value) <= 5 * step / math.sqrt(len(x))  # five standard errors
    assert len(rounded.unique()) <= 2


@SPECS
def test_stochastic_rounding_leaves_exact_values_alone(spec):
    values = decode(EVERY_CODE, spec)
    finite = values.isfinite()
    assert torch.equal(encode(values, spec, noise_like(values))[finite], EVERY_CODE[finite])


def test_e8m0_equals_torch():
    qdata = torch.arange(255, dtype=torch.uint8)
    values = decode_e8m0(qdata)
    assert torch.equal(values, qdata.view(torch.float8_e8m0fnu).float())
    assert decode_e8m0(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@examples(300)
@given(st.floats(min_value=0, max_value=FP32.max, width=32), st.sampled_from(list(FP8_SPECS.values())))
def test_scale_is_the_smallest_power_of_two_that_fits(amax, spec):
    scale = Fraction(scale_inv_of(torch.tensor(amax), spec).item())
    least, most = (Fraction(2) ** k for k in exponent_range(spec))
    fits = Fraction(amax) <= Fraction(spec.max) * scale
    assert least <= scale <= most
    assert fits or scale == most
    assert scale == least or Fraction(amax) > Fraction(spec.max) * scale / 2
    assert encode_scale_of(scale_inv_of(torch.tensor(amax), spec)).item() == 1 / scale


@SPECS
def test_scaled_codes_are_exact_in_bf16_even_without_subnormals(spec):
    values = decode(EVERY_CODE, spec)
    values = values[values.isfinite() & (values != 0)]
    for k in exponent_range(spec):
        scaled = values * 2.0**k
        assert torch.equal(scaled.bfloat16().float(), scaled)
        assert scaled.abs().min() >= BF16.tiny
        assert scaled.abs().max() <= BF16.max


@st.composite
def matrices(draw):
    rows, cols = draw(st.integers(0, 300)), draw(st.integers(0, 300))
    seed, spread = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 1.0, 20.0, 60.0]))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x = x * torch.exp2((torch.rand(rows, cols, generator=generator) - 0.5) * 2 * spread)
    x[torch.rand(rows, cols, generator=generator) < 0.05] = 0.0
    if draw(st.booleans()) and x.numel():
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))] = draw(
            st.sampled_from([math.inf, -math.inf, math.nan, FP32.max, 1e-45])
        )
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@examples(80)
@given(matrices(), st.sampled_from(TILES), st.sampled_from(list(FP8_SPECS.values())), st.booleans())
def test_tiles_equal_one_tile_at_a_time(x, tile, spec, power_of_two):
    tiled = quantize(x, fp8_format(spec, tile, power_of_two=power_of_two))
    assert tiled.qdata.shape == x.shape
    assert tuple(tiled.scale_inv.shape) == tile.grid(tuple(x.shape))
    rows, cols = tile.sizes(tuple(x.shape))
    for i in range(tiled.scale_inv.shape[0]):
        for j in range(tiled.scale_inv.shape[1]):
            part = x[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols].float()
            finite = part[part.isfinite()]
            amax = finite.abs().max() if finite.numel() else torch.zeros(())
            scale_inv = scale_inv_of(amax, spec, power_of_two=power_of_two)
            qdata = encode(part * encode_scale_of(scale_inv, power_of_two=power_of_two), spec)
            assert tiled.scale_inv[i, j] == scale_inv
            assert torch.equal(tiled.qdata[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols], qdata)


@examples(60)
@given(matrices(), st.sampled_from(TILES), st.sampled_from(list(FP8_SPECS.values())))
def test_error_of_an_element_is_at_most_half_a_step(x, tile, spec):
    tiled = quantize(x, fp8_format(spec, tile))
    exact = x.double()
    wide = exact.abs() < spec.max * 2.0 ** exponent_range(spec)[1]  # beyond, values saturate
    scale = tiled.scale_inv.double().repeat_interleave(tile.sizes(tuple(x.shape))[0], 0)[: x.shape[0]]
    scale = scale.repeat_interleave(tile.sizes(tuple(x.shape))[1], 1)[:, : x.shape[1]]
    bound = torch.maximum(exact.abs() * spec.eps / 2, scale * spec.smallest / 2)
    excess = torch.where(wide, (tiled.dequantize().double() - exact).abs() - bound, 0.0)
    assert not x.numel() or excess.max() <= 0, f"worst element {x.flatten()[excess.argmax()].item()!r}"
    assert torch.equal(tiled.dequantize().isnan(), ~x.isfinite())
    assert torch.equal(tiled.dequantize(torch.bfloat16).float().nan_to_num(), tiled.dequantize().nan_to_num())


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_transposed_is_quantised_transpose(tile):
    x = torch.randn(200, 333)
    ours, direct = quantize(x, fp8_format(E4M3, tile)).transposed(), quantize(x.T, fp8_format(E4M3, tile.transposed()))
    assert torch.equal(ours.qdata, direct.qdata)
    assert torch.equal(ours.scale_inv, direct.scale_inv)
    assert ours.tile == direct.tile


def test_tile_amax_ignores_what_is_not_finite():
    x = torch.tensor([[1.0, -math.inf, 3.0, math.nan]])
    assert tile_amax(x, ROW_TILE).item() == 3.0


def test_wrong_scales_are_refused():
    qdata = torch.zeros(200, 300, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"need scales \[2, 3\], not \[1, 1\]"):
        TiledTensor(qdata, torch.ones(1, 1), BLOCK_TILE, E4M3)
    with pytest.raises(ValueError, match="uint8"):
        TiledTensor(qdata.float(), torch.ones(2, 3), BLOCK_TILE, E4M3)


def test_measures_tell_tiles_from_one_scale():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 512, generator=generator)
    x[:, :2] *= 3e3  # outlier features
    one, tiles = measure(x, quantize(x, fp8_format(E4M3, TENSORWISE))), measure(x, quantize(x, FP8_ROW))
    assert one.underflow > 5 * tiles.underflow
    assert one.dynamic_range_log2 >= tiles.dynamic_range_log2 > 10
    assert tiles.saturation == one.saturation == tiles.not_finite == 0
    assert 25 < tiles.sqnr_db < 40  # a uniform relative error of up to 2^-4


def test_measures_count_saturation_and_what_is_not_finite():
    x = torch.full((1, 4), FP32.max)
    x[0, 0], x[0, 1] = math.inf, 1.0
    error = measure(x, quantize(x, fp8_format(E4M3, TENSORWISE)))
    assert (error.saturation, error.not_finite) == (pytest.approx(2 / 3), 0.25)
    assert sqnr_db(torch.ones(3), torch.ones(3)) == math.inf


def test_fp16_and_bf16_give_the_same_codes_as_fp32():
    for dtype in (FP16.dtype, BF16.dtype):
        x = torch.randn(64, 256).to(dtype)
        assert torch.equal(quantize(x, FP8_ROW).qdata, quantize(x.float(), FP8_ROW).qdata)
        assert torch.equal(
            quantize(x, fp8_format(E5M2, ROW_TILE)).qdata, quantize(x.float(), fp8_format(E5M2, ROW_TILE)).qdata
        )
