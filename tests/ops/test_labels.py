"""Labels of a loss: what is no class is refused as torch refuses it, what is ignored leaves no trace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.optim.test_citizen import assert_in_words
from tilewright.core.errors import ConfigError, LabelError
from tilewright.core.hardware import detect_machine
from tilewright.models.base.output_head import head_loss, logits_loss
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.init import init_decoder
from tilewright.models.distill.loss import batch_loss
from tilewright.ops.backends.native import wide
from tilewright.ops.kernels import Kernels
from tilewright.ops.loss import LINEAR_CROSS_ENTROPY

N, D, V = 12, 8, 50
CANDIDATES = {candidate.name: candidate.run for candidate in LINEAR_CROSS_ENTROPY.candidates}
FAST = [name for name in CANDIDATES if name != "compiled"]
NO_CLASS = (-1, -2, -99, -101, V, V + 1, 57, 2**31, -(2**31), 2**62, -(2**63))
TILE = 5 * V * 4
"""Bytes of some rows' logits: several chunks."""


def case(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    labels_N = torch.randint(0, V, (N,), generator=generator)
    labels_N[3] = -100
    return x_ND, weight_VD, labels_N


@given(
    name=st.sampled_from(FAST),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bad=st.dictionaries(st.integers(0, N - 1), st.sampled_from(NO_CLASS), max_size=3),
    learns=st.booleans(),
)
def test_a_label_that_is_no_class_is_refused_where_torch_refuses_it(name, dtype, bad, learns):
    x_ND, weight_VD, labels_N = case(dtype)
    for row, value in bad.items():
        labels_N[row] = value
    with torch.set_grad_enabled(learns):
        try:
            want = F.cross_entropy((x_ND @ weight_VD.T).float(), labels_N, reduction="sum")
        except IndexError:
            with pytest.raises(LabelError) as caught:
                CANDIDATES[name](x_ND, weight_VD, labels_N, TILE)
            row, value = next((row, value) for row, value in sorted(bad.items()))
            assert_in_words(caught.value, f"{value} at {row}", f"0 to {V - 1}", "-100")
            assert isinstance(caught.value, IndexError), "the class that torch raises"
            return
        got, count, _ = CANDIDATES[name](x_ND, weight_VD, labels_N, TILE)
    assert int(count) == N - 1
    # Logits of 16 bits are rounded to them in either; 12 rows, each off by the rounding of a logit.
    torch.testing.assert_close(got, want, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("value", NO_CLASS)
def test_compiled_code_refuses_them_too(value):
    x_ND, weight_VD, labels_N = case()
    labels_N[7] = value
    with pytest.raises(LabelError, match=f"{value} at 7"):
        CANDIDATES["compiled"](x_ND, weight_VD, labels_N, TILE)


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("learns", [True, False])
def test_labels_of_another_number_or_dtype_are_refused(name, learns):
    x_ND, weight_VD, labels_N = case()
    for labels in (labels_N[:-1], torch.cat([labels_N, labels_N]), labels_N[:, None], labels_N.int(), labels_N.float()):
        with torch.set_grad_enabled(learns), pytest.raises(LabelError) as caught:
            CANDIDATES[name](x_ND, weight_VD, labels, TILE)
        assert_in_words(caught.value, str(tuple(labels.shape)), f"({N},)", "int64")


def decoder():
    model = Decoder(DecoderConfig.of(dim=D, num_layers=1, num_heads=2, vocab_size=V))
    init_decoder(model, seed=0)
    return model


def plain_batch():
    ids = torch.arange(N).view(2, N // 2)
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def pairs_batch():
    ids = torch.arange(N).view(1, 2, N // 2)
    some = {"reference": torch.zeros(1, 2), "beta": torch.full((1,), 0.1), "rows": torch.zeros(1, dtype=torch.int64)}
    return {"input_ids": ids, "labels": ids.roll(1, 2), **some}


def taught_batch():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, N // 2, D, generator=generator)
    head = torch.randn(V, D, generator=generator)
    return plain_batch() | {
        "teacher_hidden": hidden,
        "teacher_head": head,
        "teacher_how": torch.tensor([2.0, 0.5, 0.0]),
    }


def head_case():
    x_ND, _, labels_N = case()
    return Kernels(detect_machine("cpu"), {"cross_entropy": "native"}), nn.Linear(D, V, bias=False), x_ND, labels_N


LOSSES = {
    "decoder": (plain_batch, lambda batch: decoder().loss(batch)),
    "pairs": (pairs_batch, lambda batch: decoder().loss(batch)),
    "taught": (taught_batch, lambda batch: decoder().loss(batch)),
    "head": (lambda: {"labels": case()[2]}, lambda batch: head_loss(*head_case()[:3], batch["labels"])),
    "logits": (lambda: {"labels": case()[2]}, lambda batch: logits_loss(torch.randn(N, V), batch["labels"])),
}


@pytest.mark.parametrize("value", [-1, -101, V, 2**40])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_refuses_them(loss, value):
    make, run = LOSSES[loss]
    batch = make()
    run(batch)
    batch["labels"].view(-1)[1] = value
    with pytest.raises(LabelError, match=f"{value} at 1"):
        run(batch)


# ---- ignored rows ----


def overflowing(dtype):
    """Logits of ignored rows are infinite, or NaN, in this format."""
    x_ND, weight_VD, labels_N = case(dtype)
    least = 2.0**-10 if dtype == torch.float16 else 2.0**-100
    with torch.no_grad():
        weight_VD /= least
        x_ND *= least
        x_ND[3] = 2.0**12 if dtype == torch.float16 else 2.0**120
    return x_ND, weight_VD, labels_N


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CANDIDATES)
def test_logits_that_overflow_in_an_ignored_row_leave_no_trace(name, dtype):
    x_ND, weight_VD, labels_N = overflowing(dtype)
    kept = labels_N != -100
    assert not (x_ND[~kept] @ weight_VD.T).isfinite().any()
    want = F.cross_entropy((x_ND[kept] @ weight_VD.T).float(), labels_N[kept], reduction="sum")
    wanted = torch.autograd.grad(want, (x_ND, weight_VD))
    got, _, each = CANDIDATES[name](x_ND, weight_VD, labels_N, TILE)
    assert each[3] == 0
    found = torch.autograd.grad(got, (x_ND, weight_VD))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=8 * eps, atol=8 * eps)
    each_of_torch = F.cross_entropy((x_ND[kept] @ weight_VD.T).float(), labels_N[kept], reduction="none")
    torch.testing.assert_close(each[kept], each_of_torch, rtol=8 * eps, atol=8 * eps)
    assert torch.equal(found[0][~kept], torch.zeros(1, D, dtype=dtype))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.isfinite().all()
        # Probabilities of the format, and sums of 12 rows or 50 classes of them.
        torch.testing.assert_close(ours, theirs, rtol=16 * eps, atol=16 * eps * float(theirs.abs().max()))


def test_logits_of_any_shape_leave_such_rows_out():
    logits_BSV = torch.randn(2, 3, V).requires_grad_()
    labels_BS = torch.tensor([[1, -100, 4], [-100, 0, V - 1]])

    def broken():
        return torch.where((labels_BS == -100)[..., None], torch.inf, logits_BSV)

    loss, count, _ = logits_loss(broken(), labels_BS)
    want = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
    assert int(count) == 4
    assert torch.equal(*(torch.autograd.grad(one, logits_BSV)[0] for one in (loss, want)))
    nothing, count, _ = logits_loss(broken(), torch.full((2, 3), -100))
    assert (float(nothing), int(count)) == (0.0, 0)
    assert not torch.autograd.grad(nothing, logits_BSV)[0].any()


def test_a_taught_head_ignores_such_a_row_too():
    kernels, head, _, _ = head_case()
    x_ND, weight_VD, labels_N = overflowing(torch.float32)
    head.weight = nn.Parameter(weight_VD.detach())
    taught = {"labels": labels_N.view(1, N), "teacher_hidden": x_ND.detach().view(1, N, D)}
    taught |= {"teacher_head": weight_VD.detach(), "teacher_how": torch.tensor([2.0, 0.5, 0.0])}
    kept = labels_N != -100
    without = {name: value[:, kept] for name, value in taught.items() if name in ("labels", "teacher_hidden")}
    found = []
    for x, batch in ((x_ND, taught), (x_ND.detach()[kept].requires_grad_(), taught | without)):
        out = batch_loss(kernels, head, x, batch)
        found.append((out.loss_sum, *torch.autograd.grad(out.loss_sum, (x, head.weight))))
    (loss, dx, dweight), (want, dx_kept, dweight_kept) = found
    assert loss.isfinite()
    assert torch.equal(dx[3], torch.zeros(D))
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(loss, want, rtol=N * eps, atol=N * eps)
    torch.testing.assert_close(dx[kept], dx_kept, rtol=V * eps, atol=V * eps * float(dx_kept.abs().max()))
    torch.testing.assert_close(dweight, dweight_kept, rtol=N * eps, atol=N * eps * float(dweight_kept.abs().max()))


# ---- backward more than once ----


@pytest.mark.parametrize("widens", [False, True], ids=["16-bit units", "none"])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=["grad as stored", "grad in fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CANDIDATES)
def test_backward_twice(name, dtype, grad_dtype, widens, monkeypatch):
    """Each pass gives its own scale times the gradient, as of a graph that runs once."""
    monkeypatch.setattr(wide, "widens", lambda *_: widens)

    def leaves():
        x_ND, weight_VD, labels_N = case(dtype)
        weight_VD = nn.Parameter(weight_VD.detach())
        if grad_dtype is not None:
            weight_VD.grad_dtype = grad_dtype
        return x_ND, weight_VD, labels_N

    x_ND, weight_VD, labels_N = leaves()
    total, *_ = CANDIDATES[name](x_ND, weight_VD, labels_N, TILE)
    for number, scale in enumerate((1.0, 0.0, 0.37, 4.0)):
        (total * scale).backward(retain_graph=number < 3)
        once_x, once_weight, _ = leaves()
        (CANDIDATES[name](once_x, once_weight, labels_N, TILE)[0] * scale).backward()
        assert torch.equal(x_ND.grad, once_x.grad), scale
        assert torch.equal(weight_VD.grad, once_weight.grad), scale
        x_ND.grad = weight_VD.grad = None


@pytest.mark.parametrize("name", FAST)
def test_some_gradients_first_and_others_later(name):
    x_ND, weight_VD, labels_N = case()
    total, *_ = CANDIDATES[name](x_ND, weight_VD, labels_N, TILE)
    dx = torch.autograd.grad(total, x_ND, retain_graph=True)[0]
    dweight = torch.autograd.grad(total, weight_VD, retain_graph=True)[0]
    both = torch.autograd.grad(total, (x_ND, weight_VD))
    assert torch.equal(dx, both[0])
    assert torch.equal(dweight, both[1])


def test_a_second_derivative_is_refused_in_words():
    """The gradient is made in forward, so a derivative of it would be zero, without a sign."""
    x_ND, weight_VD, labels_N = case()
    total, *_ = CANDIDATES["native"](x_ND, weight_VD, labels_N, TILE)
    (dx,) = torch.autograd.grad(total, x_ND, create_graph=True)
    with pytest.raises(ConfigError) as caught:
        (total + dx.square().sum()).backward()
    assert_in_words(caught.value, "gradient of a gradient", 'ops.cross_entropy = "ref"')
    total, *_ = CANDIDATES["ref"](x_ND, weight_VD, labels_N, TILE)
    (dx,) = torch.autograd.grad(total, x_ND, create_graph=True)
    (total + dx.square().sum()).backward()
