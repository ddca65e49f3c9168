"""The head's loss in chunks: a weight whose gradient is kept in FP32 gets the numbers of a BF16 gradient, in pieces."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.ops.backends.native import loss

N, D, V = 96, 32, 200


@pytest.fixture
def small_pieces(monkeypatch):
    """Rows of the weight's gradient go seven at a time, the last piece is shorter."""
    monkeypatch.setattr(loss, "PIECE", 7 * D)
    assert V % 7


def gradients(weight_VD, passes=2):
    """Gradients at the input and the weight, summed over some passes with different rows."""
    generator = torch.Generator().manual_seed(1)
    dx = []
    for _ in range(passes):
        x_ND = torch.randn(N, D, generator=generator).bfloat16().requires_grad_()
        labels_N = torch.randint(0, V, (N,), generator=generator)
        total, _ = loss.eager(x_ND, weight_VD, labels_N, tile_bytes=V * 2 * 20)
        (total * 0.37).backward()
        dx.append(x_ND.grad)
    return torch.stack(dx), weight_VD.grad


def leaf(grad_dtype=None):
    weight_VD = torch.nn.Parameter(torch.randn(V, D, generator=torch.Generator().manual_seed(0)).bfloat16())
    if grad_dtype is not None:
        weight_VD.grad_dtype = grad_dtype
    return weight_VD


@pytest.mark.usefixtures("small_pieces")
def test_a_wide_gradient_has_the_numbers_of_the_rounded_one():
    """One pass: what BF16 holds, bit for bit. Two: their sum in FP32, which BF16 could not hold."""
    _, narrow = gradients(leaf(), passes=1)
    _, wide = gradients(leaf(torch.float32), passes=1)
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(wide, narrow.float())
    _, summed = gradients(leaf(torch.float32), passes=2)
    assert not torch.equal(summed, summed.bfloat16().float())


def test_pieces_change_no_bit(monkeypatch):
    whole = gradients(leaf(torch.float32))
    monkeypatch.setattr(loss, "PIECE", 7 * D)
    pieces = gradients(leaf(torch.float32))
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


@pytest.mark.usefixtures("small_pieces")
def test_a_weight_that_was_cast_keeps_autograd_s_rules():
    """Of an FP32 weight used in BF16 the gradient arrives through the cast, in FP32 and rounded once."""
    weight_VD = torch.nn.Parameter(leaf().detach().float())
    x_ND = torch.randn(N, D).bfloat16()
    labels_N = torch.randint(0, V, (N,))
    loss.eager(x_ND, weight_VD.bfloat16(), labels_N, tile_bytes=2**20)[0].backward()
    low = leaf()
    loss.eager(x_ND, low, labels_N, tile_bytes=2**20)[0].backward()
    assert torch.equal(weight_VD.grad, low.grad.float())


class WideCopies(TorchDispatchMode):
    """Counts copies of a whole weight's size in FP32."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype is torch.float32 and out.numel() == V * D:
            self.count += 1
        return out


@pytest.mark.usefixtures("small_pieces")
def test_autograd_makes_no_second_fp32_copy():
    with WideCopies() as copies:
        gradients(leaf(torch.float32))
    assert copies.count == 0


class Tables(TorchDispatchMode):
    """Counts FP32 results as large as the weight, which itself is in BF16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.numel() == V * D
        return out


def test_a_frozen_head_costs_no_gradient_of_its_own():
    """Under adapters: the same gradient at the input, and nothing as large as the head is made."""
    labels_N = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    found, tables = [], []
    for frozen in (False, True):
        weight_VD = leaf(torch.float32).requires_grad_(not frozen)
        x_ND = torch.randn(N, D, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        with Tables() as made:
            (loss.eager(x_ND, weight_VD, labels_N, tile_bytes=V * 2 * 20)[0] * 0.37).backward()
        found.append(x_ND.grad)
        tables.append(made.count)
        assert (weight_VD.grad is None) == frozen
    assert torch.equal(*found)
    assert tables[0] > 0
    assert tables[1] == 0
