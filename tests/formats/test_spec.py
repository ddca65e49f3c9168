"""The formats against torch.finfo, and rounding against exact arithmetic on every exponent."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.formats.spec import BF16, FP16, FP32, SPECS, TF32, round_to


@pytest.mark.parametrize("spec", [FP32, BF16, FP16], ids=lambda spec: spec.name)
def test_spec_equals_finfo(spec):
    info = torch.finfo(spec.dtype)
    assert (spec.max, spec.tiny, spec.eps, spec.bits) == (info.max, info.tiny, info.eps, info.bits)
    assert spec.smallest == info.smallest_normal * info.eps


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_bits_add_up(spec):
    assert spec.bits == 1 + spec.exponent_bits + spec.mantissa_bits


def nearest_tf32(value: float) -> float:
    """Round one FP32 value to 10 mantissa bits with exact rationals: the independent reference."""
    if math.isnan(value) or math.isinf(value) or value == 0:
        return value
    exact = Fraction(value)
    exponent = max(math.frexp(value)[1] - 1, -126)
    step = Fraction(2) ** (exponent - 10)
    rounded = round(exact / step) * step  # Fraction's round is half to even
    if abs(rounded) >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


def bits_of(values: torch.Tensor) -> list[int]:
    return (values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF).tolist()


def check_tf32(patterns: list[int]) -> None:
    x = torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32).copy())
    got = round_to(x, TF32)
    want = torch.tensor([nearest_tf32(value) for value in x.tolist()], dtype=torch.float32)
    same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
    worst = [hex(p) for p, ok in zip(patterns, same.tolist(), strict=True) if not ok][:5]
    assert not worst, f"wrong at {worst}"


def test_tf32_at_every_exponent_and_edge():
    fractions = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001, 0x7FEFFF, 0x7FF000, 0x7FFFFF]
    patterns = [
        sign << 31 | exponent << 23 | fraction for sign in (0, 1) for exponent in range(256) for fraction in fractions
    ]
    check_tf32(patterns)


@examples(50)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_tf32_on_any_bits(patterns):
    check_tf32(patterns)


@pytest.mark.parametrize("spec", [BF16, FP16], ids=lambda spec: spec.name)
def test_16_bit_formats_equal_torch_casts(spec):
    x = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    got, want = round_to(x, spec), x.to(spec.dtype).to(torch.float32)
    assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


def test_bf16_by_the_integer_path_equals_the_cast():
    """The integer arithmetic is the same for every format with FP32's exponent: BF16 has a second opinion."""
    stored_as_fp32 = type(BF16)("bf16", 16, 8, 7, torch.float32)
    x = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    got, want = round_to(x, stored_as_fp32), round_to(x, BF16)
    assert torch.equal(got.isnan(), want.isnan())
    assert bits_of(got.nan_to_num(nan=0.0)) == bits_of(want.nan_to_num(nan=0.0))


def test_fp32_is_left_alone_and_rounding_is_idempotent():
    x = torch.randn(1000)
    assert torch.equal(round_to(x, FP32), x)
    once = round_to(x, TF32)
    assert torch.equal(round_to(once, TF32), once)
    assert (once - x).abs().max() <= 0.5 * TF32.eps * x.abs().max() * 2


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="FP32"):
        round_to(torch.ones(2, dtype=torch.float64), TF32)


def test_reference_itself():
    assert nearest_tf32(1.0 + 2**-11) == 1.0
    assert struct.pack(">f", nearest_tf32(-0.0)) == b"\x80\x00\x00\x00"
