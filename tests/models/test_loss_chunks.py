"""A loss summed in chunks with its gradients at once: against FP64 in one piece, in all formats, with parts frozen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.draws import examples
from tilewright.models.distill.chunked_loss import summed_in_chunks
from tilewright.ops.linear import machines_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of_chunk(x_CD, weight_VD, labels_C):
    each_C = F.cross_entropy(machines_linear(x_CD, weight_VD).float(), labels_C, reduction="none")
    return each_C.sum(), each_C.detach()[:, None]


def exact(x_ND, weight_VD, labels_N, dtype):
    """The sum, the loss of each row, and gradients, in FP64 from the values that the format has."""
    x, weight = (each.detach().to(dtype).double().requires_grad_() for each in (x_ND, weight_VD))
    each_N = F.cross_entropy(x @ weight.T, labels_N, reduction="none")
    each_N.sum().backward()
    return each_N.sum().item(), each_N.detach(), x.grad, weight.grad


@examples(40)
@given(
    st.integers(1, 40), st.integers(1, 24), st.integers(2, 60), st.integers(1, 45), st.sampled_from(DTYPES),
    st.sampled_from((1.0, 2.0**-12, 2.0**10)), st.integers(0, 2**31),
)  # fmt: skip
def test_gradients_are_those_of_one_piece(rows, width, words, chunk, dtype, scale, seed):
    """Scales are those of loss scaling and of means over tokens; FP16 has them before it rounds."""
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight_VD = (torch.randn(words, width, generator=generator) * width**-0.5).requires_grad_()
    labels_N = torch.randint(words, (rows,), generator=generator)
    want, want_N, want_x, want_weight = exact(x_ND, weight_VD, labels_N, dtype)
    total, each_N1 = summed_in_chunks(of_chunk, x_ND, weight_VD, (labels_N,), chunk)
    assert not each_N1.requires_grad
    (total * scale).backward()
    eps = torch.finfo(dtype).eps
    # Logits round once, and so do their gradients, of which a weight's sums N and an input's V terms.
    assert abs(total.item() - want) <= 8 * eps * rows * (1 + want_N.max().item())
    for name, found, wanted in (("x", x_ND.grad, want_x), ("weight", weight_VD.grad, want_weight)):
        error = (found.double() / scale - wanted).abs().max().item()
        size = want_x.abs().max().item() + want_weight.abs().max().item() + 1
        tiny = torch.finfo(dtype).smallest_normal * max(rows, words) / scale if dtype == torch.float16 else 0.0
        assert error <= 16 * eps * size * max(rows, words) ** 0.5 + tiny, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", ["x", "weight", "both", "neither"])
def test_what_is_frozen_has_no_gradient(frozen, dtype):
    x_ND = torch.randn(9, 4).to(dtype).requires_grad_(frozen not in ("x", "both"))
    weight_VD = torch.randn(7, 4).requires_grad_(frozen not in ("weight", "both"))
    total, _ = summed_in_chunks(of_chunk, x_ND, weight_VD, (torch.arange(9) % 7,), 4)
    assert total.requires_grad == (frozen != "both")
    if frozen != "both":
        total.backward()
    assert (x_ND.grad is not None) == x_ND.requires_grad
    assert (weight_VD.grad is not None) == weight_VD.requires_grad


@pytest.mark.parametrize("chunk", [8, 64, 4096])
def test_a_weight_in_16_bits_sums_its_gradient_in_fp32(chunk):
    """4,096 rows in 512 chunks: sums in BF16 lose 4 %, and the more the more chunks there are."""
    generator = torch.Generator().manual_seed(0)
    x_ND, weight_VD = (torch.randn(rows, 16, generator=generator).bfloat16().requires_grad_() for rows in (4096, 50))
    labels_N = torch.randint(50, (4096,), generator=generator)
    _, _, _, want = exact(x_ND, weight_VD, labels_N, torch.bfloat16)
    summed_in_chunks(of_chunk, x_ND, weight_VD, (labels_N,), chunk)[0].backward()
    error = ((weight_VD.grad.double() - want).norm() / want.norm()).item()
    print(f"{chunk=}: {error:.2e}")
    # Logits, their gradients, each chunk's product and the sum round once: by a quarter of an eps in the mean, and
    # rows apart from each other.
    assert weight_VD.grad.dtype == torch.bfloat16
    assert error <= 0.5 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("chunk", [4, 64])
def test_small_gradients_in_fp16_are_scaled_before_they_round(chunk):
    """Of rows that are nearly learned: some 1e-8, of which FP16 has nothing without loss scaling."""
    x_ND = torch.eye(16).half().requires_grad_()
    weight_VD = (torch.eye(16) * 18.0 + torch.linspace(0, 1, 256).view(16, 16)).requires_grad_()
    labels_N, scale = torch.arange(16), 2.0**14
    *_, want = exact(x_ND, weight_VD, labels_N, torch.float16)
    (summed_in_chunks(of_chunk, x_ND, weight_VD, (labels_N,), chunk)[0] * scale).backward()
    others = ~torch.eye(16, dtype=torch.bool)  # a word's own is the rest of one, which FP32 does not have so exactly
    error = ((weight_VD.grad.double() / scale / want - 1).abs()[others]).max().item()
    print(f"{chunk=}: {error:.2e}")
    assert error <= 4 * torch.finfo(torch.float16).eps  # bound: logits are exact here, gradients round twice


def test_no_rows_have_no_loss():
    x_ND, weight_VD = torch.zeros(0, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    total, each_N1 = summed_in_chunks(of_chunk, x_ND, weight_VD, (torch.zeros(0, dtype=torch.int64),), 4)
    total.backward()
    assert (float(total.detach()), each_N1.shape, weight_VD.grad.any()) == (0.0, (0, 1), False)


def test_a_write_between_two_losses_of_one_autocast_counts():
    x_ND, weight_VD = torch.randn(9, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    labels_N = torch.arange(9) % 7
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            total, _ = summed_in_chunks(of_chunk, x_ND, weight_VD, (labels_N,), 4)
            want, *_ = exact(x_ND, weight_VD, labels_N, torch.bfloat16)
            assert abs(total.item() - want) <= 9 * 8 * torch.finfo(torch.bfloat16).eps * (1 + want / 9)
            with torch.no_grad():
                weight_VD.mul_(-2)


def test_backward_twice_adds_the_same_again():
    x_ND, weight_VD = torch.randn(9, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    total, _ = summed_in_chunks(of_chunk, x_ND, weight_VD, (torch.arange(9) % 7,), 4)
    total.backward(retain_graph=True)
    once = x_ND.grad.clone(), weight_VD.grad.clone()
    total.backward()
    assert all(torch.equal(each.grad, 2 * before) for each, before in zip((x_ND, weight_VD), once, strict=True))
