"""Every candidate on a CUDA device against FP64 on the CPU. Run with `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.ops.cases import attention_cases
from tests.ops.compare import assert_snr
from tests.ops.low_bit import KINDS, LowBitCase, assert_same, hyper
from tests.ops.test_ops import DTYPES, SNR_DB, grads_of, plain_attention
from tilewright.core.hardware import detect_machine
from tilewright.ops.attention import ATTENTION
from tilewright.ops.backends.ref.low_bit_adam import low_bit_adam
from tilewright.ops.base.dispatch import Case
from tilewright.ops.linear import LINEAR
from tilewright.ops.loss import LINEAR_CROSS_ENTROPY
from tilewright.ops.low_bit_adam import LOW_BIT_ADAM
from tilewright.ops.norm import RMS_NORM

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def candidate_or_skip(op, name, dtype):
    candidate = next(candidate for candidate in op.candidates if candidate.name == name)
    reason = candidate.why_not(detect_machine(), Case("cuda", dtype))
    if reason:
        pytest.skip(reason)
    return candidate


def check(run, reference, inputs, dtype):
    """`run` on the GPU against `reference` in FP64 on the CPU, outputs and gradients."""
    out, grads = grads_of(run, [x.cuda() for x in inputs])
    want, want_grads = grads_of(reference, [x.double() if x.is_floating_point() else x for x in inputs])
    assert_snr(out.cpu(), want, SNR_DB[dtype], "output")
    for i, (grad, want_grad) in enumerate(zip(grads, want_grads, strict=True)):
        assert_snr(grad.cpu(), want_grad, SNR_DB[dtype], f"gradient {i}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [c.name for c in LINEAR.candidates])
def test_linear(name, dtype):
    run = candidate_or_skip(LINEAR, name, dtype).run
    weight, bias = torch.randn(24, 40).to(dtype).float(), torch.randn(24).to(dtype).float()
    check(run, lambda x, w, b: x @ w.T + b, [torch.randn(3, 7, 40).to(dtype), weight, bias], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [c.name for c in RMS_NORM.candidates])
def test_rms_norm(name, dtype):
    run = candidate_or_skip(RMS_NORM, name, dtype).run

    def plain(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    check(lambda x, w: run(x, w, 1e-5), plain, [torch.randn(4, 50).to(dtype) * 3, torch.randn(50)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", list(attention_cases()), ids=str)
@pytest.mark.parametrize("name", [c.name for c in ATTENTION.candidates])
def test_attention(name, case, dtype):
    run = candidate_or_skip(ATTENTION, name, dtype).run
    q, k, v, segments = case.tensors(dtype)
    on_gpu = None if segments is None else segments.cuda()
    check(
        lambda q, k, v: run(q, k, v, on_gpu), lambda q, k, v: plain_attention(q, k, v, segments), [q, k, v], dtype
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", list(attention_cases()), ids=str)
def test_attention_by_blocks(case, dtype):
    run = candidate_or_skip(ATTENTION, "native", dtype).run
    q, k, v, segments = case.tensors(dtype)
    on_gpu = None if segments is None else segments.cuda()
    check(
        lambda q, k, v: run(q, k, v, on_gpu, None, 32),
        lambda q, k, v: plain_attention(q, k, v, segments), [q, k, v], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [c.name for c in LINEAR_CROSS_ENTROPY.candidates])
def test_linear_cross_entropy(name, dtype):
    run = candidate_or_skip(LINEAR_CROSS_ENTROPY, name, dtype).run
    x, weight = torch.randn(21, 16).to(dtype), torch.randn(97, 16).to(dtype).float() / 4
    labels = torch.randint(0, 97, (21,))
    labels[[0, 5, 20]] = -100
    check(
        lambda x, w: run(x, w, labels.cuda(), 8 * 97 * 2)[0],
        lambda x, w: F.cross_entropy(x @ w.T, labels, ignore_index=-100, reduction="sum"),
        [x, weight], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [c.name for c in LOW_BIT_ADAM.candidates])
def test_low_bit_adam_has_the_bits_of_the_law(name, kind):
    run = candidate_or_skip(LOW_BIT_ADAM, name, torch.float32).run
    case = LowBitCase(kind, 9 * (128 * 10 + 5), rows=9)
    law = case.tensors()
    fields = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in vars(law).items()}
    ours = replace(law, **fields)
    for step, grad in enumerate(case.awkward_grads(5), 1):
        run(replace(ours, grad=grad.cuda()), hyper(step))
        low_bit_adam(replace(law, grad=grad), hyper(step))
        found = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in vars(ours).items()}
        assert_same(replace(law, **found), law, f"{case}, step {step}")
