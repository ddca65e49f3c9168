"""Newton-Schulz: every candidate against the polynomial of the singular values, in FP64; torch's bits in BF16."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.hardware import detect_machine
from tilewright.ops.base.dispatch import Case, choose
from tilewright.ops.newton_schulz import NEWTON_SCHULZ

CANDIDATES = {candidate.name: candidate.run for candidate in NEWTON_SCHULZ.candidates}
GAIN = 3.4445
"""Most that one iteration multiplies a relative error of small singular values with; of all others less."""
SHAPES = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 3), st.integers(1, 24), st.integers(1, 24)),
)


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_svd(x, num_steps):
    """The definition: the quintic polynomial of each singular value, in FP64."""
    x = x.to(torch.bfloat16).double()
    left, singular, right = torch.linalg.svd(x, full_matrices=False)
    singular = singular / torch.linalg.matrix_norm(x)[..., None].clamp(min=1e-7)
    for _ in range(num_steps):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    return left @ torch.diag_embed(singular) @ right


@pytest.mark.parametrize("name", CANDIDATES)
@given(shape=SHAPES, num_steps=st.integers(1, 6), scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e6]))
def test_singular_values_follow_the_polynomial(name, shape, num_steps, scale):
    """In FP32 what is left is the rounding of the result to BF16, 2^-9 of it, and FP32's own, handed on by each
    iteration. In BF16 each of the three products of an iteration rounds, 2^-9 of a norm of 1.3 sqrt(S)."""
    x = scale * normal(shape)
    want = by_svd(x, num_steps)
    got = CANDIDATES[name](x.to(torch.bfloat16), num_steps)
    assert got.dtype == torch.bfloat16
    _check_error(name, got, want, num_steps)


def _check_error(name, got, want, num_steps):
    error = (got.double() - want).abs().max().item()
    inner = 2**-9 if name == "native" else 2**-24
    bound = 2**-8 * want.abs().max().item() + 3 * min(want.shape[-2:]) ** 0.5 * inner * GAIN ** min(num_steps, 5)
    assert error <= bound, f"{name} is off by {error:.2g}, allowed {bound:.2g}"


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 4), (5, 7), (2, 7, 5)])
def test_zeros_stay_zeros(name, shape):
    assert torch.equal(CANDIDATES[name](torch.zeros(shape)), torch.zeros(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", CANDIDATES)
def test_any_layout(name):
    """Not to the bit: MKL adds in another order where an operand is transposed."""
    x = normal((12, 20)).bfloat16()
    want = by_svd(x, 5)
    for view in (x, x.T.contiguous().T, x.repeat_interleave(2, 1)[:, ::2]):
        _check_error(name, CANDIDATES[name](view, 5), want, 5)


def test_bf16_has_torchs_bits():
    param = torch.nn.Parameter(torch.zeros(24, 40))
    param.grad = normal((24, 40)).float()
    torch.optim.Muon([param], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    assert torch.equal(-param.detach(), CANDIDATES["native"](param.grad).float())


@pytest.mark.parametrize(
    ("features", "name"),
    [((), "wide"), (("avx2", "avx512f"), "wide"), (("avx512_bf16",), "native"), (("bf16",), "native")],
)
def test_cpus_that_do_not_multiply_bf16_take_fp32(features, name):
    machine = replace(detect_machine("cpu"), cpu_features=frozenset(features))
    assert choose(NEWTON_SCHULZ, machine, Case("cpu", torch.bfloat16)).candidate.name == name
    assert choose(NEWTON_SCHULZ, machine, Case("cuda", torch.bfloat16)).candidate.name == "native"
