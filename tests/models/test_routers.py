"""Routers are what a model chooses by: compared with what is seen to reach a choice in a forward pass."""

import pytest
import torch
from torch import nn

from tests.models.choices import Choices
from tests.models.moe_families import build, families, run
from tilewright.models.routers import find_routers

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
