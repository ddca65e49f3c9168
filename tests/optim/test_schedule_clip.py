"""Schedules at their corners, clipping against torch and its promises."""

import itertools
import math

import pytest
import torch
from torch import nn

from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.optim.schedule import LRSchedule


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warmup_is_linear_and_nothing_exceeds_the_peak(kind):
    schedule = LRSchedule(kind, 2.0, 50, 5, 0.2, 0.1)
    rates = [schedule.lr_at(step) for step in range(60)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert max(rates) == 2.0
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rates[4:]))
    assert rates[49] == pytest.approx(2.0 if kind == "constant" else 0.2)
    assert rates[59] == rates[49]


def test_cosine_equals_its_formula_and_wsd_is_flat_until_the_decay():
    cosine = LRSchedule("cosine", 1.0, 101, 0, min_lr_ratio=0.0)
    assert cosine.lr_at(25) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    wsd = LRSchedule("wsd", 1.0, 100, 10, 0.2, 0.0)
    assert wsd.lr_at(79) == 1.0
    assert wsd.lr_at(80) == 1.0
    assert wsd.lr_at(99) == pytest.approx(0.0)


def grads_with_norm(norm):
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    raw = [torch.randn(3), torch.randn(2, 2), None]
    length = math.sqrt(sum(float(g.square().sum()) for g in raw if g is not None))
    for param, grad in zip(params, raw, strict=True):
        param.grad = None if grad is None else grad * (norm / length)
    return params


def test_clipping_equals_torch_clip_grad_norm():
    params = grads_with_norm(7.0)
    want = [None if p.grad is None else p.grad.clone() / 2 for p in params]
    reference = [nn.Parameter(torch.zeros_like(p)) for p in params]
    for param, grad in zip(reference, want, strict=True):
        param.grad = grad
    nn.utils.clip_grad_norm_(reference, 1.0)
    result = GradClip(1.0)(params, inv_scale=0.5)  # loss scale 2
    assert result.norm == pytest.approx(3.5, rel=1e-5)
    for param, other in zip(params[:2], reference[:2], strict=True):
        torch.testing.assert_close(param.grad, other.grad)


def test_adaptive_bound_follows_the_running_mean():
    clip = GradClip(0.0, adaptive=2.0, momentum=4)
    for _ in range(4):
        assert clip(grads_with_norm(1.0)).bound == math.inf
    params = grads_with_norm(10.0)
    result = clip(params)
    assert result.bound == pytest.approx(2.0, rel=1e-4)
    assert float(torch.nn.utils.get_total_norm([p.grad for p in params[:2]])) == pytest.approx(2.0, rel=1e-4)
    other = GradClip(0.0, adaptive=2.0, momentum=4)
    other.load_state_dict(clip.state_dict())
    assert other(grads_with_norm(1.0)).bound == clip(grads_with_norm(1.0)).bound


@pytest.mark.parametrize(("value", "word"), [(2e5, "clip_threshold"), (math.nan, "finite"), (math.inf, "finite")])
def test_bad_norms_skip_the_step_and_touch_nothing(value, word):
    params = grads_with_norm(1.0)
    params[0].grad[0] = value
    before = [p.grad.clone() for p in params[:2]]
    assert word in GradClip(1.0, threshold=1e5)(params, inv_scale=1.0).skip
    for grad, param in zip(before, params[:2], strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=0, atol=0, equal_nan=True)


def test_the_threshold_is_on_the_unscaled_gradient():
    assert GradClip(1.0, threshold=1e5)(grads_with_norm(2e5), inv_scale=0.25).skip is None


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 3))
    model[0].weight.requires_grad_(True)
    model[2].weight.requires_grad_(False)
    decay, rest = decay_groups(model, 0.3)
    assert [p.shape for p in decay["params"]] == [(4, 3)]
    assert [len(rest["params"]), decay["weight_decay"], rest["weight_decay"]] == [3, 0.3, 0.0]


@pytest.mark.parametrize("elements", [0.0, 0.4])
def test_a_sparse_gradient_is_clipped_as_a_dense_one(elements):
    """Rows that were looked up twice count with their sum. The dense gradient beside it is clipped by the same norm."""
    tables = [nn.Embedding(7, 3, sparse=sparse) for sparse in (True, False)]
    norms = []
    for table in tables:
        nn.init.ones_(table.weight)
        beside = nn.Parameter(torch.ones(2))
        (table(torch.tensor([1, 1, 4])).sum() * beside.sum()).backward()
        norms.append(GradClip(0.5, elements=elements)([table.weight, beside], inv_scale=0.25).norm)
        norms.append(beside.grad.norm().item())
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-6)
    torch.testing.assert_close(tables[0].weight.grad.to_dense(), tables[1].weight.grad)
    assert tables[0].weight.grad.is_sparse
