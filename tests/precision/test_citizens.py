"""What PyTorch does with a module it also does with a converted one, with the right result or a refusal in words."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap

from tilewright.core.errors import ConfigError
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.lora.lora import add_lora
from tilewright.precision.policy.gemm_formats import SCALED_FORMATS

KERNELS = Kernels.default()
KINDS = [*SCALED_FORMATS, "kept values", "lora"]


class Net(nn.Module):
    """Two layers that read one input, and one that reads theirs."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(136, 40), nn.Linear(136, 40, bias=False), nn.Linear(40, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


def converted(kind, seed=0):
    from tilewright.precision.policy.policy import Policy

    torch.manual_seed(seed)
    model = Net()
    if kind == "lora":
        add_lora(model, 2, base="fp8", kernels=KERNELS)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
    policy = Policy("fp8_tile", keep="value") if kind == "kept values" else "fp8_tile" if kind == "lora" else kind
    convert(model, policy, kernels=KERNELS)
    QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


@pytest.fixture
def x():
    return torch.randn(6, 136, generator=torch.Generator().manual_seed(1))


def loss_of(model, params, x):
    return functional_call(model, params, (x,)).float().square().sum()


def by_autograd(model, x):
    model.zero_grad()
    model(x).float().square().sum().backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.requires_grad}


def trained(model):
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), f"{name}: off by {(got[name] - want[name]).abs().max():.3g}"


@pytest.mark.parametrize("kind", KINDS)
def test_func_grad_is_that_of_backward(kind, x):
    model = converted(kind)
    want = by_autograd(model, x)
    assert_same(grad(lambda params: loss_of(model, params, x))(trained(model)), want)
    loss, pull = vjp(lambda params: loss_of(model, params, x), trained(model))
    assert_same(pull(torch.ones_like(loss))[0], want)
    assert_same(by_autograd(model, x), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sample(kind, x):
    model = converted(kind)
    each = vmap(grad(lambda params, row: loss_of(model, params, row[None])), in_dims=(None, 0))(trained(model), x)
    for index in range(len(x)):
        assert_same({name: value[index] for name, value in each.items()}, by_autograd(model, x[index : index + 1]))


@pytest.mark.parametrize("kind", SCALED_FORMATS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_ensemble_in_one_call(kind, x):
    models = [converted(kind, seed) for seed in range(3)]
    stacked = stack_module_state(models)
    outs = vmap(lambda params, buffers: functional_call(models[0], (params, buffers), (x,)))(*stacked)
    for model, out in zip(models, outs, strict=True):
        assert torch.equal(out, model(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_jacobian(kind, x):
    model = converted(kind)
    rows = jacrev(model)(x[:1])
    for index in range(8):
        point = x[:1].clone().requires_grad_()
        (want,) = torch.autograd.grad(model(point)[0, index], point)
        # One row of the output gradient beside zeros has other tiles than eight rows of one each: FP8's precision.
        assert torch.allclose(rows[0, index, 0], want[0], atol=0.1 * float(want.abs().max()))


SECOND = {
    "create_graph": lambda model, x: torch.autograd.grad(
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum(), x
    ),
    "of the weights": lambda model, x: torch.autograd.grad(
        sum(
            g.square().sum()
            for g in torch.autograd.grad(
                model(x).square().sum(), [p for p in model.parameters() if p.requires_grad], create_graph=True
            )
        ),
        x,
    ),
    "penalty and backward": lambda model, x: (
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].norm().backward()
    ),
    "func.grad of grad": lambda model, x: grad(lambda a: grad(lambda b: model(b).sum())(a).square().sum())(x.detach()),
    "hessian": lambda model, x: hessian(lambda a: model(a).sum())(x.detach()[:1]),
    "jvp": lambda model, x: jvp(model, (x.detach(),), (x.detach(),)),
    "forward_ad": lambda model, x: _dual(model, x),
}


def _dual(model, x):
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x.detach(), torch.ones_like(x)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", SECOND)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_other_derivatives_are_refused_in_words(how, kind, x):
    model = converted(kind)
    with pytest.raises(ConfigError, match=r"no (second|forward-mode) derivative") as error:
        SECOND[how](model, x.requires_grad_())
    assert "bf16_mixed" in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_create_graph_alone_changes_nothing(kind, x):
    model = converted(kind)
    want = by_autograd(model, x)
    model.zero_grad()
    model(x).float().square().sum().backward(create_graph=True)
    assert_same({name: param.grad.detach() for name, param in model.named_parameters() if param.requires_grad}, want)


@pytest.mark.parametrize("kind", KINDS)
def test_export(kind, x):
    model = converted(kind)
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), model(x))
    with torch.no_grad():
        next(p for p in exported.parameters()).mul_(3)
    assert exported(x).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_moving_without_values(kind, x):
    model = converted(kind)
    values = copy.deepcopy(model.state_dict())
    want = model(x)
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(values)
    assert torch.equal(model(x), want)


@pytest.mark.parametrize("kind", SCALED_FORMATS)
def test_sparse_gradients_of_an_embedding(kind):
    model = nn.Sequential(nn.Embedding(50, 136, sparse=True), nn.Linear(136, 8))
    dense = nn.Sequential(nn.Embedding(50, 136), nn.Linear(136, 8))
    dense.load_state_dict(model.state_dict())
    for each in (model, dense):
        convert(each, kind, kernels=KERNELS)
        each(torch.tensor([1, 2, 2, 49])).sum().backward()
    assert model[0].weight.grad.is_sparse
    assert torch.equal(model[0].weight.grad.to_dense(), dense[0].weight.grad)
