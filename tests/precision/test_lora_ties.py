"""Adapters on models that share weights, freeze some, or compute some: merging changes what it has to, nothing else."""

import copy
import itertools
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.models.shapes import KERNELS
from tilewright.core.errors import ConfigError
from tilewright.precision.convert import convert
from tilewright.precision.lora.lora import adapted_layers, add_lora, merge_lora
from tilewright.precision.lora.modules_to_save import shared_weights

WIDTH, WORDS = 16, 40
IDS = torch.arange(12).view(2, 6)


class Net(nn.Module):
    """Layers one after another; `ties` are pairs of names whose weights are one."""

    def __init__(self, ties=()):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=index == 1) for index in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        for one, other in ties:
            self.get_submodule(other).weight = self.get_submodule(one).weight

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


TIES = {
    "two_adapted": ([("layers.0", "layers.2")], ["layers.*"]),
    "three_adapted": ([("layers.0", "layers.2"), ("layers.0", "layers.3")], ["layers.*"]),
    "one_adapted": ([("layers.0", "layers.2")], ["layers.2"]),
    "embedding": ([("words", "layers.1")], ["layers.*"]),
    "two_pairs": ([("layers.0", "layers.2"), ("layers.1", "layers.3")], ["layers.0", "layers.2", "layers.3"]),
    "none": ([], ["layers.*"]),
}


def adapted(net, targets, base, seed=1):
    names = add_lora(net, rank=3, alpha=6.0, targets=targets, base=base, kernels=KERNELS)
    torch.manual_seed(seed)
    for module in adapted_layers(net).values():
        nn.init.normal_(module.lora_B, std=0.2)
    return names


def expected(net):
    """A plain copy of the model in which each layer has the matrix that it multiplies by, of its own."""
    plain = Net()
    plain.load_state_dict(
        {name: p for name, p in net.state_dict().items() if "lora" not in name and "scale" not in name}
    )
    for name, module in net.named_modules():
        if hasattr(module, "lora_A"):
            codes = hasattr(module, "tiled_weight")
            weight = module.tiled_weight().dequantize() if codes else module.weight.detach()
            target = plain.get_submodule(name)
            target.weight = nn.Parameter(weight + module.lora_scaling * (module.lora_B @ module.lora_A).detach())
    return plain


@pytest.mark.parametrize("base", ["keep", "fp8"])
@pytest.mark.parametrize("ties", TIES)
def test_merged_layers_compute_what_they_did(ties, base, caplog):
    pairs, targets = TIES[ties]
    net = Net(pairs)
    with caplog.at_level(logging.WARNING):
        names = adapted(net, targets, base)
        want = expected(net)(IDS)
        untouched = {
            name: value.clone()
            for name, value in net.state_dict().items()
            if "lora" not in name and not any(name.startswith(f"{adapted}.") for adapted in names)
        }
        if base == "keep":
            torch.testing.assert_close(net(IDS), want, rtol=1e-5, atol=1e-5)
        assert merge_lora(net) == names
    torch.testing.assert_close(net(IDS), want, rtol=1e-5, atol=1e-5)  # FP32 sums of a few layers
    for name, value in untouched.items():
        assert torch.equal(net.state_dict()[name], value), f"{name} has no adapter and was changed"
    tied = [name for pair in pairs for name in pair if name in names]
    assert all(name in caplog.text for name in tied), "a weight that is no longer shared is said"
    assert bool(caplog.records) == bool(tied)


@pytest.mark.parametrize("ties", ["two_adapted", "three_adapted"])
def test_layers_that_share_a_weight_share_its_codes(ties):
    net = Net(TIES[ties][0])
    adapted(net, ["layers.*"], "fp8")
    groups = [set(names) for names in shared_weights(net).values()]
    members = {name for pair in TIES[ties][0] for name in pair}
    assert groups == [members, members], "codes and scales"


@pytest.mark.parametrize("base", ["keep", "fp8"])
@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile"])
def test_converted_before_or_after(base, mode):
    nets = [Net(TIES["two_adapted"][0]) for _ in range(2)]
    convert(nets[0], mode, kernels=KERNELS)
    for net in nets:
        adapted(net, ["layers.*"], base)
    convert(nets[1], mode, kernels=KERNELS)
    want = expected(nets[1])
    for net in nets:
        merge_lora(net)
        for name, value in want.state_dict().items():
            torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-6, atol=1e-6)


# ---- what is frozen ----

FROZEN = [(), ("words.weight",), ("layers.0.weight", "layers.1.bias"), ("layers.1.weight", "head.bias", "head.weight")]


@pytest.mark.parametrize("base", ["keep", "fp8"])
@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("ties", ["none", "two_adapted"])
def test_merging_leaves_frozen_what_was_frozen(ties, frozen, base):
    net = Net(TIES[ties][0])
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    before = {name: p.requires_grad for name, p in net.named_parameters(remove_duplicate=False)}
    adapted(net, ["layers.0", "layers.1", "layers.2"], base)
    assert [name for name, p in net.named_parameters() if p.requires_grad and "lora" not in name] == []
    copied = copy.deepcopy(net)
    for each in (net, copied):
        merge_lora(each)
        assert {name: p.requires_grad for name, p in each.named_parameters(remove_duplicate=False)} == before
    assert not any("frozen_before_lora" in vars(module) for module in net.modules())


def test_merging_a_part_leaves_frozen_what_was_frozen():
    net = Net()
    net.layers[1].weight.requires_grad_(False)
    adapted(net, ["layers.*"], "keep")
    merge_lora(net.layers)
    assert [name for name, p in net.named_parameters() if p.requires_grad] == [
        "layers.0.weight", "layers.1.bias", "layers.2.weight", "layers.3.weight"
    ]  # fmt: skip


def test_what_is_unfrozen_meanwhile_stays_so_and_integers_stay_frozen():
    net = Net()
    net.counts = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    net.words.weight.requires_grad_(False)
    adapted(net, ["layers.*"], "keep")
    net.words.weight.requires_grad_(True)
    merge_lora(net)
    assert net.words.weight.requires_grad
    assert not net.counts.requires_grad


def test_twice():
    """Frozen, adapted, merged and adapted again: merging remembers the last time."""
    net = Net()
    net.words.weight.requires_grad_(False)
    for _ in range(2):
        adapted(net, ["layers.*"], "fp8")
        merge_lora(net)
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["words.weight"]


# ---- weights that are computed ----

COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "hook": nn.utils.spectral_norm,
}


@pytest.mark.parametrize(("kind", "base"), list(itertools.product(COMPUTED, ["keep", "fp8"])))
def test_a_layer_whose_weight_is_computed_gets_no_adapter(kind, base):
    """An adapter could not be added to a weight that the next forward computes anew."""
    net, other = Net(), Net()
    for each in (net, other):
        each.layers[1] = COMPUTED[kind](each.layers[1])
    assert adapted(net, ["layers.*"], base) == ["layers.0", "layers.2", "layers.3"]
    net(IDS).sum().backward()
    with pytest.raises(ConfigError, match="matches no linear layer"):
        add_lora(other, targets=["layers.1"], kernels=KERNELS)
