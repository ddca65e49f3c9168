"""Square codes and 24-bit weights: what they can hold, what they expect, and that rounding is right on average."""

import pytest
import torch

from tests.ops.compare import snr_db
from tilewright.formats.quadratic_map import BLOCK, LEAST, TINY, decode, encode, num_blocks, root
from tilewright.formats.rounding import join24, round_bf16, split24


def noise_of(size, seed=0, most=256):
    return torch.randint(0, most, (size,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_kept(signed):
    """Values that are in codes come back whatever the noise: nothing drifts by being stored again."""
    # The largest code is in both blocks, so that their scales stay.
    qdata = torch.arange(-127, 129).clamp(max=127).to(torch.int8)
    qdata = qdata if signed else torch.tensor([*[255] * 4, *range(4, 256)], dtype=torch.uint8)
    for scale in (1.0, 3e-7, 1e20):
        scales = torch.full((2,), scale)
        values = decode(qdata, scales)
        for noise in (0, 128, 255):
            again, new = encode(values, torch.full(values.shape, noise, dtype=torch.int32), signed=signed)
            # x * (1/n^2) * n^2 is off by two roundings, which moves no code across half of noise's finest step.
            torch.testing.assert_close(new, scales, rtol=2**-22, atol=0)
            assert (again.int() - qdata.int()).abs().max() == 0


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 1000])
def test_error_of_a_value_is_less_than_a_step(size, signed):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)) ** 3
    x = x if signed else x.abs()
    qdata, scale = encode(x, noise_of(size), signed=signed)
    assert (qdata.shape, scale.shape) == (x.shape, (num_blocks(size),))
    assert qdata.dtype == (torch.int8 if signed else torch.uint8)
    values = decode(qdata, scale)
    # Between c^2 and (c + 1)^2 lie 2c + 1; unsigned, what is below the least code is raised to it.
    unit = scale.repeat_interleave(BLOCK)[:size]
    step = unit * (2 * (x.abs() / unit.clamp_min(1e-30)).sqrt() + 1)
    step = step if signed else step.clamp(min=unit * LEAST**2)
    assert bool(((values - x).abs() <= step * (1 + 1e-6)).all())


@pytest.mark.parametrize("signed", [True, False])
def test_right_on_average(signed):
    """All 256 noises: the mean is the value, but for half of noise's finest step, 1/512 of a step."""
    x = torch.rand(BLOCK, generator=torch.Generator().manual_seed(0)) + 2e-3  # above the least unsigned value
    x[0] = 1.5
    each = [decode(*encode(x, torch.full((BLOCK,), noise, dtype=torch.int32), signed=signed)) for noise in range(256)]
    mean = torch.stack(each).double().mean(0)
    steps = 127 if signed else 255
    unit = 1.5 / steps**2
    step = unit * (2 * (x / unit).sqrt() + 1)
    worst = int(((mean - x).abs() / step).argmax())
    assert (mean - x)[worst].abs() <= step[worst] * (1 / 512 + 1e-4), f"{x[worst]}: {mean[worst]}"


def test_blocks_without_numbers_and_with_bad_ones():
    x = torch.zeros(4 * BLOCK)
    x[BLOCK] = TINY / 2
    x[2 * BLOCK] = torch.inf
    x[3 * BLOCK + 5] = torch.nan
    for signed in (True, False):
        qdata, scale = encode(x, noise_of(len(x)), signed=signed)
        assert scale[:2].tolist() == [0.0, 0.0]
        assert scale[2:].isnan().all()
        assert set(qdata.tolist()) == {0 if signed else LEAST}
    assert not decode(torch.zeros(300, dtype=torch.uint8), torch.zeros(3)).any()


def test_root_is_the_nearest():
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    found, wanted = root(x), x.double().sqrt()
    for other in (torch.nextafter(found, torch.tensor(2.0)), torch.nextafter(found, torch.tensor(0.0))):
        assert bool(((found.double() - wanted).abs() <= (other.double() - wanted).abs()).all())


AWKWARD = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, -1.1754944e-38])


def test_24_bits():
    x = torch.cat([torch.randn(100_000) * torch.exp2(8 * torch.randn(100_000)), AWKWARD])
    weight, low = split24(x, noise_of(len(x)))
    back = join24(weight, low)
    finite = x.isfinite()
    assert torch.equal(back.isnan(), x.isnan())
    assert torch.equal(back[x.isinf()], x[x.isinf()])
    # One step of 16 significant bits, or of a subnormal.
    error = (back[finite].double() - x[finite].double()).abs()
    assert bool((error <= x[finite].double().abs() * 2.0**-15 + 2.0**-140).all())
    apart, least = ((narrow.double() - back.double())[finite].abs() for narrow in (weight, back.bfloat16()))
    assert torch.equal(apart, least), "the weight is the BF16 number nearest to both parts"


@pytest.mark.parametrize("parts", [1, 2])
def test_rounding_of_weights_is_right_on_average(parts):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    count, size = (65536, 1024) if parts == 1 else (256, 1)
    mean = torch.zeros(1000, dtype=torch.float64)
    for noise in range(0, count, size):
        given = torch.full((1000,), noise, dtype=torch.int32)
        mean += round_bf16(x, given).double() if parts == 1 else join24(*split24(x, given)).double()
    mean /= count // size
    # 64 noises at equal distances leave 1/64 of a BF16 step, 256 nothing but half of 2^-24.
    assert snr_db(mean, x) > (75 if parts == 1 else 140)


def test_what_bf16_cannot_hold():
    rounded = round_bf16(AWKWARD, noise_of(len(AWKWARD), most=65536))
    assert torch.equal(rounded[:6].float(), AWKWARD[:6])
    assert rounded[6].isnan()
