"""The loss of each token beside their sum: torch's own in FP64, in each candidate (compiled: `test_labels`);
no bit of the sum is another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tilewright.data.batches.microbatches import sums_by_document, sums_by_row, sums_of_rows
from tilewright.models.base.output_head import logits_loss
from tilewright.ops.base.labels import summed_and_each
from tilewright.ops.loss import LINEAR_CROSS_ENTROPY

CANDIDATES = {candidate.name: candidate.run for candidate in LINEAR_CROSS_ENTROPY.candidates}
FAST = [name for name in CANDIDATES if name != "compiled"]
D, V = 8, 37


def packed(rows, length, seed, ignored, padded):
    """Operands, labels and documents [B, S]; some labels are ignored, the end of each row may be padding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    labels = torch.randint(0, V, (rows, length), generator=generator)
    segments = (torch.rand(rows, length, generator=generator) < 0.3).cumsum(1).int()
    end = torch.arange(length) >= length - min(padded, length)
    segments[:, end] = -1
    labels[(torch.rand(rows, length, generator=generator) < ignored) | end] = -100
    return x, weight, labels, segments


def close(got, want, x, weight, dtype, terms):
    """A logit is off by a rounding to `dtype` and D of its sum's; a loss by two logits and V + 4 roundings of FP32."""
    logit = float((x.double().abs() @ weight.double().abs().T).max())
    eps32 = torch.finfo(torch.float32).eps
    bound = terms * (2 * logit * (torch.finfo(dtype).eps + D * eps32) + (V + 4 + terms) * eps32 * (logit + 4))
    worst = float((got.double() - want).abs().max()) if got.numel() else 0.0
    assert worst <= bound, f"off by {worst:.3g} of {bound:.3g}"


@given(
    name=st.sampled_from(FAST),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(1, 4),
    length=st.integers(1, 9),
    chunk=st.integers(1, 40),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    padded=st.integers(0, 3),
    learns=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tokens_rows_and_documents_are_torch_s(name, dtype, rows, length, chunk, ignored, padded, learns, seed):
    x, weight, labels, segments = packed(rows, length, seed, ignored, padded)
    x, weight = x.to(dtype).requires_grad_(learns), weight.to(dtype).requires_grad_(learns)
    flat = x.flatten(0, 1)
    total, count, each = CANDIDATES[name](flat, weight, labels.flatten(), chunk * V * dtype.itemsize)
    want = F.cross_entropy((flat.double() @ weight.double().T).detach(), labels.flatten(), reduction="none")
    assert each.dtype == torch.float32
    assert not each.requires_grad
    assert not each[labels.flatten() == -100].any()
    close(each, want, x.detach(), weight.detach(), dtype, 1)
    assert int(count) == int((labels != -100).sum())

    each_BS, batch = each.view(rows, length), {"labels": labels, "segments": segments}
    sums, counts = sums_by_row(each_BS, batch)
    assert counts.tolist() == [int((row != -100).sum()) for row in labels]
    close(sums, want.view(rows, length).sum(1), x.detach(), weight.detach(), dtype, length)
    close(sums.sum(), total.detach().double(), x.detach(), weight.detach(), dtype, rows * length)
    of_documents, numbers = sums_by_document(each_BS, batch)
    assert of_documents.shape[1] == max(int(segments.max()) + 1, 0)
    for row in range(rows):
        for document in range(of_documents.shape[1]):
            inside = segments[row] == document
            close(of_documents[row, document], want.view(rows, length)[row][inside].sum(), x.detach(), weight.detach(),
                  dtype, length)  # fmt: skip
            assert int(numbers[row, document]) == int((labels[row][inside] != -100).sum())
    if learns:
        total.backward()


@given(rows=st.integers(0, 300), wide=st.booleans(), ignored=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 99))
def test_the_sum_is_the_bits_of_torch_s_cross_entropy(rows, wide, ignored, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, V, generator=generator) * 9).to(torch.float64 if wide else torch.float32)
    labels = torch.randint(0, V, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = -100
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got, each = summed_and_each(ours, labels)
    want = F.cross_entropy(theirs, labels, reduction="sum")
    assert torch.equal(got, want)
    assert torch.equal(each, F.cross_entropy(logits, labels, reduction="none"))
    assert all(map(torch.equal, torch.autograd.grad(got, ours), torch.autograd.grad(want, theirs)))


def test_logits_of_rows_without_a_target_leave_no_trace_in_each():
    logits = torch.full((2, 3, V), torch.inf)
    labels = torch.full((2, 3), -100)
    logits[1, 2], labels[1, 2] = 0.0, 4
    total, _, each = logits_loss(logits, labels)
    assert each.tolist() == [[0.0] * 3, [0.0, 0.0, pytest.approx(float(total))]]


def test_rows_of_micro_batches_follow_each_other():
    labels = {"labels": torch.tensor([[1, 2], [3, -100]])}
    each = torch.tensor([[1.0, 2.0], [5.0, 0.0]])
    sums, counts = sums_of_rows([(each, labels), (2 * each, labels)])
    assert (sums.tolist(), counts.tolist()) == ([3.0, 5.0, 6.0, 10.0], [2, 1, 2, 1])
    assert sums_of_rows([]) is None
    assert sums_of_rows([(each, labels), (None, labels)]) is None
