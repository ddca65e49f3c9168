"""What an MLP may contain and what PyTorch does with modules: in chunks as whole, or whole with a word."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from tests.memory.test_chunked_mlp import Layer, assert_equal_results, results
from tilewright.memory.chunked_mlp import chunk_mlps
from tilewright.precision.convert import convert

WIDTH, HIDDEN = 6, 10


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), *between, nn.Linear(HIDDEN, WIDTH)).double()


class Own(nn.Module):
    """A module by its forward."""

    def __init__(self, forward, **buffers):
        super().__init__()
        self.way = forward
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.way(self, x)


def count_calls(module, x):
    module.calls += 1
    return x


def smoothed(module, x):
    if module.training:
        module.mean = 0.9 * module.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
    return x - module.mean


TOKEN_WISE = {
    "plain": lambda: mlp(nn.ReLU()),
    "in_place": lambda: mlp(nn.ReLU(inplace=True)),
    "layer_norm": lambda: mlp(nn.LayerNorm(HIDDEN)),
    "parametrized": lambda: mlp(parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN)), nn.Tanh()),
    "dropout_of_nothing": lambda: mlp(nn.Dropout(0.0), Own(lambda m, x: F.dropout(x, 0.0, m.training))),
}
TIED = {
    "batch_norm": lambda: mlp(nn.BatchNorm1d(HIDDEN)),
    "batch_norm_without_statistics": lambda: mlp(nn.BatchNorm1d(HIDDEN, track_running_stats=False)),
    "mean_in_training": lambda: mlp(Own(lambda m, x: x - m.training * x.mean(-2, keepdim=True))),
    "spectral_norm": lambda: mlp(parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN))),
    "counter": lambda: mlp(Own(count_calls, calls=torch.zeros((), dtype=torch.int64))),
    "running_mean": lambda: mlp(Own(smoothed, mean=torch.zeros(HIDDEN))),
    "max_of_all": lambda: mlp(Own(lambda m, x: x / x.abs().max())),
}


def pair(make, chunks=3):
    """A layer in chunks, the same whole, and the notes."""
    layer, notes = Layer(make()).double(), []
    whole = copy.deepcopy(layer)
    assert chunk_mlps(layer, chunks, notes.append) == ["mlp"]
    return layer, whole, notes


def tokens(count=14, seed=1):
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", [*TOKEN_WISE, *TIED])
def test_any_content_computes_what_the_whole_does(kind, training):
    """Forward, gradients, and buffers after several steps; what is tied runs whole, and a note says why."""
    layer, whole, notes = pair((TOKEN_WISE | TIED)[kind])
    for step in range(3):
        for each in (layer, whole):
            each.train(training)
            each.zero_grad()
        assert_equal_results(results(layer, tokens(seed=step)), results(whole, tokens(seed=step)), 1e-12)
        for (name, got), want in zip(layer.named_buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    if training:
        assert len(notes) == (kind in TIED), notes


def test_what_runs_whole_in_training_is_cut_in_evaluation():
    layer, whole, _ = pair(TIED["batch_norm"])
    layer(tokens())
    whole(tokens())
    sizes = []
    layer.mlp[0].register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    layer(tokens())
    whole(tokens())
    layer.eval(), whole.eval()
    assert_equal_results(results(layer, tokens()), results(whole, tokens()), 1e-12)
    assert sizes[0] == 14, "training"
    assert max(sizes[-3:]) == 5, "evaluation, in chunks"


def test_modules_of_one_class_are_tried_one_by_one():
    """`nn.Sequential` may hold anything."""
    model = nn.ModuleList([Layer(TOKEN_WISE["plain"]()), Layer(TIED["batch_norm"]())])
    whole = copy.deepcopy(model)
    chunk_mlps(model, 3, lambda text: None)
    for layer, other in zip(model, whole, strict=True):
        assert_equal_results(results(layer, tokens()), results(other, tokens()), 1e-12)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_few_tokens(count):
    """Also before and after a call of many, and none are tried: one token alone shows nothing of ties."""
    for kind in ("plain", "mean_in_training"):
        layer, whole, _ = pair((TOKEN_WISE | TIED)[kind])
        for number in (count, 14, count):
            got, want = results(layer, tokens(number)), results(whole, tokens(number))
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)
    assert layer(torch.zeros(0, 3, WIDTH, dtype=torch.float64)).shape == (0, 3, WIDTH)


def test_noise_is_refused_and_the_generator_left_alone():
    layer, whole, notes = pair(lambda: mlp(Own(lambda m, x: x + torch.rand_like(x))))
    torch.manual_seed(3)
    got = results(layer, tokens())
    torch.manual_seed(3)
    assert_equal_results(got, results(whole, tokens()), 1e-12)
    assert "random numbers" in notes[0]


# ---- torch.func ----


def loss_with(layer, tensors, x):
    return functional_call(layer, tensors, (x,)).square().sum()


def other_tensors(layer, factor=0.7):
    return {name: (factor * value.detach()).clone() for name, value in layer.state_dict().items()}


@pytest.mark.parametrize("kind", ["plain", "layer_norm", "batch_norm"])
@pytest.mark.parametrize("trained", ["all", "some"])
def test_functional_call_gives_gradients_of_its_tensors(kind, trained):
    layer, whole, _ = pair((TOKEN_WISE | TIED)[kind])
    layer.eval(), whole.eval()
    found = []
    for each in (layer, whole):
        tensors = other_tensors(each)
        learn = list(dict(each.named_parameters()))
        learn = learn[1:2] if trained == "some" else learn
        for name in learn:
            tensors[name].requires_grad_()
        loss_with(each, tensors, tokens()).backward()
        found.append({name: tensors[name].grad for name in learn})
        assert all(p.grad is None for p in each.parameters()), "the module's own parameters have no part in it"
    assert_equal_results(found[0], found[1], 1e-12)


def test_functional_call_through_a_computed_weight():
    """Weights that are a function of others, as in meta-learning."""
    found = []
    for each in pair(TOKEN_WISE["plain"])[:2]:
        rate = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        own = dict(each.named_parameters())
        loss = loss_with(each, {name: value * (1 - rate) for name, value in own.items()}, tokens())
        found.append(dict(zip(["rate", *own], torch.autograd.grad(loss, [rate, *own.values()]), strict=True)))
    assert_equal_results(found[0], found[1], 1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms():
    layer, whole, _ = pair(TOKEN_WISE["plain"])
    layer(tokens())
    params = {name: value.detach() for name, value in whole.named_parameters()}
    x = tokens(24).view(4, 6, WIDTH)
    for way in (grad(loss_with, 1), vmap(grad(loss_with, 1), in_dims=(None, None, 0))):
        if way is not grad:
            got, want = (way(each, params, x) for each in (layer, whole))
            assert_equal_results(got, want, 1e-12)


# ---- copies ----

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "averaged": lambda layer: AveragedModel(layer, use_buffers=True).module,
}


@pytest.mark.parametrize("after_a_call", [True, False])
@pytest.mark.parametrize("mode", [None, "bf16_mixed"])
@pytest.mark.parametrize("way", COPIES)
def test_copies_train_by_themselves(way, mode, after_a_call):
    layer, _, _ = pair(TOKEN_WISE["layer_norm"])
    layer.float()
    if mode:
        convert(layer, mode)
    x = tokens().float()
    want = results(layer, x)
    layer.zero_grad()
    if after_a_call:
        layer(x)
    twin = COPIES[way](layer)
    with torch.no_grad():
        for param in layer.parameters():
            param.zero_()
    assert_equal_results(results(twin, x), want, 0)


def test_assigned_tensors_are_used():
    layer, whole, _ = pair(TOKEN_WISE["plain"])
    layer(tokens())
    new = other_tensors(layer)
    for each in (layer, whole):
        each.load_state_dict(copy.deepcopy(new), assign=True)
    assert_equal_results(results(layer, tokens()), results(whole, tokens()), 1e-12)


def test_a_write_between_forward_and_backward_is_an_error_as_it_is_whole():
    for each in pair(TOKEN_WISE["plain"])[:2]:
        out = each(tokens().requires_grad_()).sum()
        with torch.no_grad():
            each.mlp[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_recomputed_under_functional_call():
    layer, whole, _ = pair(TOKEN_WISE["plain"])
    found = []
    for each in (layer, whole):
        tensors = {name: value.requires_grad_() for name, value in other_tensors(each).items()}
        x = tokens().requires_grad_()
        run = lambda x, each=each, tensors=tensors: loss_with(each, tensors, x)  # noqa: E731
        checkpoint(run, x, use_reentrant=False).backward()
        found.append({"x": x.grad, **{name: value.grad for name, value in tensors.items()}})
    assert_equal_results(found[0], found[1], 1e-12)
