"""24 bits in two parts: every pair is a number, and what was written to the 16-bit part counts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.formats.rounding import join24, split24

EVERY_WEIGHT = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NONE = torch.zeros(2**16, dtype=torch.int32)


def test_a_written_weight_is_what_was_written_to_half_a_step():
    """All weights beside all corrections that another number may have left."""
    for low in (*range(-128, 128, 17), -1, 0, 1, 127):
        got = join24(EVERY_WEIGHT, torch.full((2**16,), low, dtype=torch.int8))
        want = EVERY_WEIGHT.float()
        exact = (want == 0) | ~want.isfinite()
        same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
        assert bool(same[exact].all()), f"{low}: zeros and what is not finite have no correction"
        away = (got.view(torch.int32).long() - want.view(torch.int32).long()).abs()[~exact]
        assert int(away.max()) <= 0x8000, "half a step"
        # The least number and a half step below it is no number of the other sign; the largest may be infinite.
        assert bool((got[~exact].sign() * want[~exact].sign() >= 0).all())
        assert not bool(got[~exact].isnan().any())


def test_a_pair_is_stored_again_with_the_same_bits():
    for low in (-128, -127, -1, 0, 1, 127):
        value = join24(EVERY_WEIGHT, torch.full((2**16,), low, dtype=torch.int8))
        weight, kept = split24(value, NONE)
        assert torch.equal(
            join24(weight, kept).view(torch.int32)[~value.isnan()], value.view(torch.int32)[~value.isnan()]
        )
        finite = EVERY_WEIGHT.isfinite() & (EVERY_WEIGHT != 0)
        assert torch.equal(weight.view(torch.int16)[finite], EVERY_WEIGHT.view(torch.int16)[finite])


@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50), noise=st.integers(0, 255))
def test_24_bits_of_any_number_are_kept(bits, noise):
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    weight, low = split24(x, torch.full(x.shape, noise, dtype=torch.int32))
    got = join24(weight, low)
    assert torch.equal(got.isnan(), x.isnan())
    away = (got.view(torch.int32).long() - x.view(torch.int32).long()).abs()
    plain = weight.isfinite() & (weight != 0)
    assert bool((away[plain] < 256).all())
    assert bool(((got == weight.float()) | plain | x.isnan()).all()), "a zero or an infinity has no correction"
