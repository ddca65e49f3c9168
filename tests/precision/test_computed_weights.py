"""Layers that compute their weight, and code that writes into results: a converted module is what the plain one is."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.cover import covering
from tests.models.shapes import KERNELS
from tilewright.models.base.output_layers import find_heads
from tilewright.precision.convert import convert, evaluating, explain, set_mode
from tilewright.precision.mixed.derived import is_injected
from tilewright.precision.policy.policy import Policy, Rule

MODES = ["fp32", "tf32", "bf16_mixed", "hybrid", "fp8_tile"]
EPS = {"fp32": 2.0**-20, "tf32": 2.0**-9, "fp8_tile": 0.15}
"""Of the largest element, after two layers; 16-bit formats: 2^-5."""


class Halved(nn.Module):
    """A parametrization of a user's own."""

    def forward(self, weight):
        return weight / 2


def of_own(module):
    parametrize.register_parametrization(module, "weight", Halved())
    return module


def of_two(module):
    return of_own(parametrizations.weight_norm(module))


def of_bias(module):
    parametrize.register_parametrization(module, "bias", Halved())
    return module


WAYS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": of_own,
    "two": of_two,
    "bias": of_bias,
}
LAYERS = {
    "linear": (lambda: nn.Linear(8, 8), (5, 8)),
    "conv1d": (lambda: nn.Conv1d(8, 8, 3), (2, 8, 7)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(8, 8, 3), (2, 8, 4, 4)),
}
CASES = [case for case in itertools.product(WAYS, LAYERS) if case != ("orthogonal", "conv_transpose")]


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def build(way, layer, when, mode):
    """A model whose first layer is parametrized, before or after it is converted; and what it is plain."""
    torch.manual_seed(0)
    plain = Net(LAYERS[layer][0])
    model = copy.deepcopy(plain)
    for each in (plain, model) if when == "before" else (plain,):
        torch.manual_seed(1)  # spectral norms draw
        WAYS[way](each.first)
    convert(model, mode, kernels=KERNELS)
    if when == "after":
        torch.manual_seed(1)
        WAYS[way](model.first)
    return model.eval(), plain.eval()


def gradients(model, x):
    model.zero_grad()
    out = model(x)
    out.float().square().mean().backward()
    return {"out": out.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_near(got, want, mode):
    assert got.keys() == want.keys()
    largest = max(float(value.abs().max()) for name, value in want.items() if name != "out")
    for name, value in want.items():
        # Of all gradients: that of a bias before a batch norm is nothing but rounding.
        error = float((got[name].float() - value).abs().max()) / (
            float(value.abs().max()) if name == "out" else largest
        )
        assert error <= EPS.get(mode, 2.0**-5), f"{name} is off by {error:.2e} of the largest element"


@pytest.mark.parametrize(("mode", "of", "when"), covering(MODES, CASES, ("before", "after")))
def test_a_computed_weight_converts_copies_and_switches(mode, of, when):
    way, layer = of
    model, plain = build(way, layer, when, mode)
    x = torch.randn(LAYERS[layer][1])
    want = gradients(plain, x)
    got = gradients(model, x)
    assert_near(got, want, mode)
    twin = copy.deepcopy(model)
    for name, value in gradients(twin, x).items():
        assert torch.equal(value, got[name]), f"{name} of the copy"
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in twin.parameters()}
    with evaluating(model), torch.no_grad():
        assert_near({"out": model(x), "": x}, {"out": want["out"], "": x}, "fp32")
    for name, value in gradients(model, x).items():
        assert torch.equal(value, got[name]), f"{name} after an evaluation"
    set_mode(model, "fp32")
    assert_near(gradients(model, x), want, "fp32")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("way", "layer"), [("weight_norm", "conv1d"), ("own", "linear"), ("bias", "linear")])
@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile"])
def test_parametrizations_come_off_again(mode, way, layer, when):
    model, plain = build(way, layer, when, mode)
    x = torch.randn(LAYERS[layer][1])
    want = model(x)
    name = "bias" if way == "bias" else "weight"
    parametrize.remove_parametrizations(model.first, name)
    parametrize.remove_parametrizations(plain.first, name)
    assert not is_injected(model.first)
    torch.testing.assert_close(model(x), want, rtol=1e-6, atol=1e-6)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert_near(gradients(model, x), gradients(plain, x), mode)


def test_pickling_is_refused_as_torch_refuses_it():
    """It would restore a module without the property that computes its weight."""
    for when in ("before", "after"):
        model, plain = build("weight_norm", "conv1d", when, "bf16_mixed")
        for each in (model, plain):
            with pytest.raises(RuntimeError, match="only supported through state_dict"):
                torch.save(each, io.BytesIO())


class Watched(nn.Module):
    """A parametrization that counts."""

    def forward(self, weight):
        self.calls = getattr(self, "calls", 0) + 1
        return weight


@pytest.mark.parametrize("mode", [*MODES, "int8"])
def test_nothing_but_a_forward_computes_weights(mode):
    """Spectral norms iterate whenever their weight is read; a tensor computed to be looked at is nobody's weight."""
    parts = [nn.Embedding(9, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 1), nn.LayerNorm(8), nn.Linear(8, 9)]
    for part in parts:
        parametrize.register_parametrization(part, "weight", Watched())
    model = nn.Sequential(*parts)
    before = [part.parametrizations.weight[0].calls for part in parts]
    policy = Policy("bf16_mixed", rules=(Rule("*", compute="int8"),)) if mode == "int8" else mode
    explain(model, policy)
    convert(model, policy, kernels=KERNELS)
    set_mode(model, policy)
    find_heads(model)
    assert [part.parametrizations.weight[0].calls for part in parts] == before


@pytest.mark.parametrize("hook", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_weights_computed_by_the_older_hooks(mode, hook):
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Net(LAYERS["linear"][0]))
        hook(nets[-1].first)
        for _ in range(10):  # spectral norms iterate
            nets[-1](torch.ones(1, 8))
        nets[-1].eval()
    convert(nets[1], mode, kernels=KERNELS)
    x = torch.randn(5, 8)
    assert_near(gradients(nets[1], x), gradients(nets[0], x), mode)


class WithState(nn.Module):
    """A module whose copies and pickles leave something behind."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 3))
        self.cache = {"made": 1}

    def forward(self, x):
        return x @ self.scale

    def __getstate__(self):
        return {**self.__dict__, "cache": {}}


def test_a_state_of_the_modules_own_is_asked_for():
    model = convert(nn.Sequential(WithState()), "bf16_mixed")
    assert copy.deepcopy(model)[0].cache == {}
    assert model[0].cache == {"made": 1}


# ---- results that are written into ----

IN_PLACE = {
    "relu": nn.ReLU(inplace=True),
    "dropout": nn.Dropout(0.0, inplace=True),
    "add": lambda out: out.add_(1).mul_(2),
    "index": lambda out: out.index_fill_(0, torch.tensor([0]), 0.0),
    "view": lambda out: out.view(-1).clamp_(-1, 1).view(out.shape),
}
PRODUCERS = {
    "linear": lambda: nn.Linear(8, 8),
    "linear_without_bias": lambda: nn.Linear(8, 8, bias=False),
    "conv": lambda: nn.Sequential(nn.Unflatten(0, (1, 4)), nn.Conv1d(4, 4, 3, padding=1), nn.Flatten(0, 1)),
    "conv_without_bias": lambda: nn.Sequential(
        nn.Unflatten(0, (1, 4)), nn.Conv1d(4, 4, 3, padding=1, bias=False), nn.Flatten(0, 1)
    ),
    "layer_norm": lambda: nn.LayerNorm(8),
    "rms_norm": lambda: nn.RMSNorm(8),
    "batch_norm": lambda: nn.BatchNorm1d(8),
    "own_code": lambda: OwnCode(),
}


class OwnCode(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(8) + 0.1)

    def forward(self, x):
        return x @ self.matrix


@pytest.mark.parametrize(("mode", "producer", "write"), covering(MODES, tuple(PRODUCERS), tuple(IN_PLACE)))
def test_results_may_be_written_into(mode, producer, write):
    """As if each had been copied before."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), PRODUCERS[producer](), nn.Linear(8, 8))
    net = convert(net, mode, kernels=KERNELS)
    x, found = torch.randn(4, 8), []
    for prepare in (lambda y: y, torch.clone):
        net.zero_grad()
        y = IN_PLACE[write](prepare(net[0](x)))
        out = net[2](IN_PLACE[write](prepare(net[1](y))))
        out.float().square().mean().backward()
        found.append({"out": out.detach(), **{name: p.grad for name, p in net.named_parameters()}})
    for name, value in found[1].items():
        assert torch.equal(found[0][name], value), name
