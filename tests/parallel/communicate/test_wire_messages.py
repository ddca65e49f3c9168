"""Wire formats: the bytes of a row, what arrives against `formats`, and sums on arrival."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.formats.quantize import quantize
from tilewright.formats.tiled import FP8_ROW
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.wire_messages import pack, row_bytes, sum_rows, unpack

KERNELS = Kernels.default()
WIRES = ("fp32", "bf16", "fp8")


def drawn(rows, values, seed):
    """Values over all of FP32's range, with zeros, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, values, generator=generator)
    x *= (
        2.0
        ** torch.randint(-140, 120, (rows, -(-values // 128) or 1), generator=generator)
        .repeat_interleave(128, 1)[:, :values]
        .float()
    )
    kinds = torch.randint(0, 60, x.shape, generator=generator)
    x[kinds == 0], x[kinds == 1], x[kinds == 2], x[kinds == 3] = 0.0, torch.inf, -torch.inf, torch.nan
    return x


def reference(x_RN, wire):
    """What arrives, by torch's own casts and by `formats`."""
    if wire == "fp32":
        return x_RN
    return x_RN.bfloat16().float() if wire == "bf16" else quantize(x_RN, FP8_ROW).dequantize()


@examples(60)
@given(st.integers(1, 5), st.one_of(st.integers(0, 400), st.sampled_from([128, 256, 1024])), st.integers(0, 2**30))
@pytest.mark.parametrize("wire", WIRES)
def test_what_arrives_is_the_rounded_value_bit_for_bit(wire, rows, values, seed):
    x_RN = drawn(rows, values, seed)
    packed_RB = pack(x_RN, wire, KERNELS)
    assert packed_RB.dtype == torch.uint8
    assert packed_RB.shape == (rows, row_bytes(values, wire))
    found_RN, want_RN = unpack(packed_RB, values, wire), reference(x_RN, wire)
    assert torch.equal(found_RN.isnan(), want_RN.isnan())
    assert torch.equal(found_RN.nan_to_num(0.5), want_RN.nan_to_num(0.5))
    # FP8's NaN takes infinities too; others keep them.
    spoiled = ~x_RN.isfinite() if wire == "fp8" else x_RN.isnan()
    assert torch.equal(found_RN.isnan(), spoiled)


@examples(30)
@given(st.integers(1, 6), st.integers(1, 400), st.integers(0, 2**30))
@pytest.mark.parametrize("wire", WIRES)
def test_sums_are_fp32_in_the_order_of_the_ranks(wire, rows, values, seed):
    x_RN = torch.randn(rows, values, generator=torch.Generator().manual_seed(seed))
    want_N = torch.zeros(values)
    for row_N in reference(x_RN, wire):
        want_N = want_N + row_N
    assert torch.equal(sum_rows(pack(x_RN, wire, KERNELS), values, wire), want_N)


def test_fp8_is_a_quarter_of_fp32_and_a_scale_per_tile():
    share = row_bytes(1 << 20, "fp8") / row_bytes(1 << 20, "fp32")
    assert share == (1 + 1 / 128) / 4 < 0.27
