"""Routers are what a model chooses by: compared with what is seen to reach a choice in a forward pass."""

import pytest
import torch
from torch import nn

from tests.models.choices import Choices
from tests.models.moe_families import build, families, run
from tilewright.models.base import routers
from tilewright.models.base.routers import find_routers
from tilewright.precision.convert import explain

SAMPLE = (
    *("afmoe", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "hunyuan_v1_moe", "jetmoe", "longcat_flash", "mixtral"),
    *("gpt_oss", "qwen3_5_moe", "jamba", "dbrx"),
)
"""Those that earlier rules got wrong, and some that they got right."""


def watched(model: nn.Module) -> Choices:
    """What a forward pass chose by."""
    choices = Choices({name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2})
    with torch.no_grad(), choices:
        run(model)
    return choices


def owners(model: nn.Module, parameters: set[str]) -> set[nn.Module]:
    return {model.get_submodule(name.rpartition(".")[0]) for name in parameters}


def check(family: str) -> None:
    model = build(family)
    seen = watched(model)
    truth, used = owners(model, seen.found), owners(model, seen.used)
    assert truth, f"{family}: the model that was built chooses nothing"
    found = set(find_routers(model))
    # A module around a router's weight, and other weights in there, are part of the router.
    parts = {module for router in found if truth & set(router.modules()) for module in router.modules()}
    names = {module: name for name, module in model.named_modules()}
    missed = sorted(names[module] for module in truth - found)
    invented = sorted(names[module] for module in (found & used) - truth - parts)
    assert not missed, f"{family}: routers that were not found: {missed}"
    assert not invented, f"{family}: no routers, but taken for ones: {invented}"
    for layer in model.modules():  # what a layer is does not depend on where it stands
        if isinstance(layer, nn.ModuleList):
            for each in layer:
                inside = {module for module in find_routers(each) if module in truth}
                assert inside == truth & set(each.modules()), f"{family}: {names[each]} alone"


@pytest.mark.parametrize("family", SAMPLE)
def test_routers_are_what_a_mixture_chooses_by(family):
    check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in families() if family not in SAMPLE])
def test_routers_are_what_every_mixture_chooses_by(family):
    check(family)


class Blocks(nn.Module):
    """As many classes as blocks, and a prediction along with the scores: no mixture."""

    def __init__(self, number: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(number))
        self.head = nn.Linear(16, number)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


class Gate(nn.Module):
    """Scores experts that another module holds, by a weight of its own, a layer of its own, or torch's function."""

    def __init__(self, width: int, number: int, style: str):
        super().__init__()
        self.style = style
        if style == "layer":
            self.scores = nn.Linear(width, number, bias=False)
        else:
            self.weight = nn.Parameter(torch.randn(number, width))

    def forward(self, x):
        if self.style == "layer":
            return self.scores(x).softmax(-1).topk(2, dim=-1)
        return best(x @ self.weight.T) if self.style == "function" else torch.topk(x @ self.weight.T, 2)


def best(scores):
    return scores.softmax(-1).topk(2, dim=-1)


class Mixture(nn.Module):
    """A mixture as people write it: the gate is a layer or a module, the experts are a list or stacked."""

    def __init__(self, style: str, stacked: bool, number: int = 5, width: int = 16):
        super().__init__()
        self.gate = nn.Linear(width, number) if style == "plain" else Gate(width, number, style)
        self.shared_gate = nn.Linear(width, 1)
        self.shared = nn.Linear(width, width)
        if stacked:
            self.experts = nn.Module()
            self.experts.up = nn.Parameter(torch.randn(number, 24, width))
            self.experts.down = nn.Parameter(torch.randn(number, width, 24))
        else:
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(number))

    def forward(self, x):
        scores = self.gate(x)
        _, index = best(scores) if isinstance(scores, torch.Tensor) else scores
        return self.shared(x) * self.shared_gate(x).sigmoid(), index


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("style", ["plain", "layer", "weight", "function"])
def test_routers_of_homemade_mixtures(style, stacked):
    model = nn.Sequential(nn.Linear(16, 16), Mixture(style, stacked), nn.Linear(16, 5))
    gate = model[1].gate
    assert list(find_routers(model)) == ([gate, gate.scores] if style == "layer" else [gate])
    assert list(find_routers(model[1])) == list(find_routers(model)), "alone it is the same"


@pytest.mark.parametrize("number", [1, 5, 16])
def test_a_head_beside_as_many_blocks_is_no_router(number):
    assert not list(find_routers(Blocks(number)))
    assert not list(find_routers(nn.ModuleDict({"body": Blocks(number), "head": nn.Linear(number, number)})))


@pytest.mark.parametrize("family", ["mamba", "mamba2", "gpt2", "bert", "vit", "rt_detr"])
def test_what_is_no_mixture_has_no_router(family):
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(family))
    names = {module: name for name, module in model.named_modules()}
    assert not [names[module] for module in find_routers(model)]


def test_a_model_is_searched_once_for_what_is_decided_of_it(monkeypatch):
    """A search reads the code of each module: with a second one it was a tenth of a small run."""
    searched, search = [], routers._Search
    monkeypatch.setattr(routers, "_Search", lambda model: searched.append(model) or search(model))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert len(explain(model, "bf16_mixed")) > 2
    assert searched == [model]
