"""Integer formats against float64 numpy: one tile at a time, ranges, packing, tensors without a range."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright import dynamic_quantize
from tilewright.core.errors import ConfigError, NumericsError
from tilewright.formats.integer import (
    INT4,
    INT8,
    INT8_AFFINE,
    IntegerTensor,
    IntSpec,
    quantize_integer,
    quantize_pairs,
)
from tilewright.formats.nibbles import pack_nibbles, unpack_nibbles
from tilewright.formats.scaling import TENSORWISE, Tile

TILES = {"tensor": TENSORWISE, "row": Tile(1, 0), "group 32": Tile(1, 32), "group 7": Tile(1, 7), "2x3": Tile(2, 3)}
SPECS = (INT8, INT4, INT8_AFFINE, IntSpec(2), IntSpec(3), IntSpec(4, narrow=True))
FP32_EPS = 2.0**-23


@st.composite
def matrices(draw, finite=True):
    rows, cols = draw(st.integers(0, 9)), draw(st.integers(0, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, cols, generator=generator) * 2.0 ** draw(st.sampled_from([-140, -60, -3, 0, 10, 120]))
    x = x + draw(st.sampled_from([0.0, 0.0, 5.0, -1e3]))
    x[torch.rand(rows, cols, generator=generator) < draw(st.sampled_from([0.0, 0.1, 1.0]))] = 0.0
    if not finite and x.numel():
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))] = draw(
            st.sampled_from([math.inf, -math.inf, math.nan])
        )
    return x


def tiles_of(x, tile):
    """(grid row, grid column, the tile's slice of x) one at a time."""
    rows, cols = tile.rows or max(x.shape[0], 1), tile.cols or max(x.shape[1], 1)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], cols):
            yield i // rows, j // cols, (slice(i, i + rows), slice(j, j + cols))


def by_hand(part, spec, symmetric):
    """Scale and zero point of one tile by float64; the scale rounded to FP32 as the format says."""
    low, high = min(part.min(), 0.0), max(part.max(), 0.0)
    if symmetric:
        return max(high / spec.highest, low / spec.lowest, 2.0**-126), 0
    scale = max((high - low) / (spec.highest - spec.lowest), 2.0**-126)
    return scale, spec.lowest - low / scale


@examples(150)
@given(matrices(), st.sampled_from(list(TILES)), st.sampled_from(SPECS), st.booleans())
def test_tiles_equal_one_tile_at_a_time_in_float64(x, tile, spec, symmetric):
    if spec.narrow and not symmetric:
        symmetric = True
    got = quantize_integer(x, spec, TILES[tile], symmetric=symmetric)
    values = got.dequantize()
    assert got.codes.dtype == torch.int8
    assert got.codes.numel() == 0 or spec.lowest <= got.codes.min() <= got.codes.max() <= spec.highest
    exact = x.double().numpy()
    for row, col, place in tiles_of(exact, TILES[tile]):
        part = exact[place]
        scale, point = by_hand(part, spec, symmetric)
        our_scale = got.scale[row, col].item()
        our_point = 0 if got.zero_point is None else got.zero_point[row, col].item()
        assert abs(our_scale / scale - 1) <= 4 * FP32_EPS, "two divisions and a difference, rounded to FP32"
        assert abs(our_point - point) <= 0.5 + 300 * FP32_EPS * 4
        steps = part / our_scale + our_point
        want = np.clip(steps, spec.lowest, spec.highest)
        codes = got.codes[place].double().numpy()
        assert (np.abs(codes - want) <= 0.5 + 512 * FP32_EPS).all(), "nearest, but for FP32's error of the quotient"
        error = np.abs(values[place].double().numpy() - part)
        most = 0.5 if symmetric else 1.0  # an integer zero point may push an end of the range half a step out
        limit = (most + 1024 * FP32_EPS) * our_scale
        assert (error <= limit).all(), f"worst {np.max(error / our_scale)} steps"


@examples(60)
@given(matrices(), st.sampled_from(list(TILES)), st.sampled_from(SPECS))
def test_what_was_rounded_rounds_to_itself(x, tile, spec):
    first = quantize_integer(x, spec, TILES[tile])
    again = IntegerTensor.from_packed(
        first.packed(), first.shape[1], first.scale, first.zero_point, first.tile, first.spec
    )
    assert torch.equal(again.codes, first.codes)
    assert torch.equal(again.dequantize(), first.dequantize())
    assert first.nbytes == first.packed().nbytes + first.scale.nbytes


@examples(60)
@given(matrices(finite=False), st.sampled_from(list(TILES)), st.sampled_from([INT8_AFFINE, INT4]), st.booleans())
def test_a_bad_element_spoils_its_own_tile_and_no_other(x, tile, spec, symmetric):
    got = quantize_integer(x, spec, TILES[tile], symmetric=symmetric)
    for row, col, place in tiles_of(x.numpy(), TILES[tile]):
        bad = not np.isfinite(x[place].numpy()).all()
        assert bool(got.dequantize()[place].isnan().all()) == bad
        assert bool(got.scale[row, col].isnan()) == bad


def test_zero_is_exact_in_affine_formats():
    x = torch.tensor([[0.0, 3.7, 9.1], [-5.3, 0.0, 0.0], [2.0, 1.0, 0.0]])
    values = quantize_integer(x, INT8_AFFINE, Tile(1, 0), symmetric=False).dequantize()
    assert (values[x == 0] == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.3, -0.7, 1e-44, 3e38])
def test_constant_tensors(value, symmetric):
    x = torch.full((3, 5), value)
    values = quantize_integer(x, INT8_AFFINE, TENSORWISE, symmetric=symmetric).dequantize()
    assert values.isfinite().all()
    torch.testing.assert_close(values, x, rtol=2 * FP32_EPS, atol=2.0**-127)  # the scale rounded, then the value


LARGEST = torch.finfo(torch.float32).max


@examples(200)
@given(
    st.lists(st.floats(-LARGEST, LARGEST, width=32) | st.sampled_from([LARGEST, -LARGEST, 3.4e38]), min_size=1),
    st.sampled_from(SPECS),
    st.booleans(),
)
def test_the_range_of_a_full_scale_does_not_overflow(values, spec, symmetric):
    """Each value comes back finite, and off by a step at most."""
    x = torch.tensor([values])
    got = quantize_integer(x, spec, TENSORWISE, symmetric=symmetric or spec.narrow)
    assert got.dequantize().isfinite().all()
    error = (got.dequantize().double() - x.double()).abs().max().item()
    assert error <= got.scale.item() * (1 + 1024 * FP32_EPS), f"{error / got.scale.item()} steps"


@pytest.mark.parametrize("values", [[3.4e38, -3.4e38], [3.4e38], [-3.4e38, 1.0], [LARGEST, -LARGEST]], ids=str)
@pytest.mark.parametrize("bits", range(2, 9))
def test_dynamic_quantize_of_the_largest_numbers(values, bits):
    codes, found = dynamic_quantize(torch.tensor(values), bit_width=bits)
    assert found.isfinite().all()
    assert (found.double() - torch.tensor(values).double()).abs().max() <= codes.scale.item() * (1 + 1024 * FP32_EPS)


def test_int4_takes_the_lowest_code_where_the_largest_value_is_negative():
    """-8..7: a scale of 1/8 of it; -7..7 would be coarser by a seventh."""
    x = torch.tensor([[-8.0, 7.0, 3.0, -1.0]])
    assert quantize_integer(x, INT4, TENSORWISE).codes.tolist() == [[-8, 7, 3, -1]]
    assert quantize_integer(x, IntSpec(4, narrow=True), TENSORWISE).scale.item() == pytest.approx(8 / 7)
    assert quantize_integer(-x, INT4, TENSORWISE).scale.item() == pytest.approx(8 / 7)  # +8 must not be clipped


# ---- packing ----


@examples(80)
@given(st.integers(0, 6), st.integers(0, 9), st.integers(0, 2**31))
def test_nibbles_equal_a_loop_and_come_back(rows, cols, seed):
    codes = torch.randint(-8, 8, (rows, cols), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    stored = pack_nibbles(codes)
    assert stored.shape == (rows, (cols + 1) // 2)
    for i in range(rows):
        for j in range(0, cols, 2):
            high = int(codes[i, j + 1]) & 15 if j + 1 < cols else 0
            assert stored[i, j // 2] == (int(codes[i, j]) & 15) + 16 * high
    assert torch.equal(unpack_nibbles(stored, cols), codes)


def test_nibbles_are_those_of_onnx():
    helper = pytest.importorskip("onnx.helper")
    from onnx import TensorProto, numpy_helper

    codes = torch.randint(-8, 8, (5, 8), dtype=torch.int8)
    proto = helper.make_tensor("codes", TensorProto.INT4, [5, 8], pack_nibbles(codes).numpy().tobytes(), raw=True)
    assert numpy_helper.to_array(proto).astype(np.int8).tolist() == codes.tolist()


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="four bits"):
        pack_nibbles(torch.tensor([[8]], dtype=torch.int8))
    with pytest.raises(ValueError, match="take 2 bytes, not 1"):
        unpack_nibbles(torch.zeros(1, 1, dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match="2 to 8 bits"):
        IntSpec(9)
    with pytest.raises(ValueError, match=r"need scales \[2, 1\]"):
        IntegerTensor(torch.zeros(2, 3, dtype=torch.int8), torch.ones(1, 1), None, Tile(1, 0), INT8)
    with pytest.raises(ValueError, match="codes are int8"):
        IntegerTensor(torch.zeros(2, 3), torch.ones(1, 1), None, TENSORWISE, INT8)


# ---- dynamic_quantize ----


@examples(60)
@given(matrices(), st.integers(2, 8))
def test_dynamic_quantize_is_within_a_step(x, bits):
    codes, values = dynamic_quantize(x, bits)
    assert values.shape == x.shape
    assert torch.equal(codes.dequantize().view(x.shape), values)
    if x.numel():
        low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
        step = max((high - low) / (2**bits - 1), 2.0**-126)
        assert (values.double() - x.double()).abs().max() <= step * (1 + 1024 * FP32_EPS)
        assert codes.codes.unique().numel() <= 2**bits


@pytest.mark.parametrize("bits", [1, 9, 8.0, "8"])
def test_dynamic_quantize_of_other_widths(bits):
    with pytest.raises(ConfigError, match="2 to 8 bits") as error:
        dynamic_quantize(torch.ones(3), bits)
    assert all((error.value.problems[0].got, error.value.problems[0].need, error.value.problems[0].try_))


def test_dynamic_quantize_of_what_has_no_range():
    assert dynamic_quantize(torch.empty(0, 3))[1].shape == (0, 3)
    assert dynamic_quantize(torch.tensor(2.5))[1].item() == 2.5
    with pytest.raises(NumericsError, match="not finite") as error:
        dynamic_quantize(torch.tensor([1.0, math.nan, math.inf]))
    assert error.value.problems[0].got.startswith("2 of 3")
    with pytest.raises(ConfigError, match="floating-point"):
        dynamic_quantize(torch.arange(3))


# ---- sums of two products ----


@examples(100)
@given(matrices(), st.booleans())
def test_no_pair_of_products_leaves_16_bits(x, one_sign):
    """vpmaddubsw clips a sum of two products of a byte from 0 to 255 and a code: none may get there."""
    found = quantize_pairs(x.abs() if one_sign else x)
    codes = found.codes.numpy().astype(np.int64)
    codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    high = 255 * (np.maximum(codes[:, ::2], 0) + np.maximum(codes[:, 1::2], 0))
    low = 255 * (np.minimum(codes[:, ::2], 0) + np.minimum(codes[:, 1::2], 0))
    assert (high <= 32767).all()
    assert (low >= -32768).all()
    error = (found.dequantize() - (x.abs() if one_sign else x)).abs()
    assert (error <= found.scale * (0.5 + 1024 * FP32_EPS)).all(), "no value is clipped"
    plain = quantize_integer(x, INT8, Tile(1, 0)).scale
    assert (found.scale >= plain).all()
    assert (found.scale <= plain * 2 * (1 + 4 * FP32_EPS)).all()
