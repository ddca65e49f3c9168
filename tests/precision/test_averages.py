"""`AveragedModel` of any converted model, at any time, with buffers or without."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from tests.cover import covering
from tests.models.shapes import KERNELS
from tilewright.memory.chunked_mlp import chunk_mlps
from tilewright.precision.convert import convert
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.integer.linear import Int8Linear
from tilewright.precision.lora.lora import add_lora


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(24, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 24)]
    return nn.ModuleDict({"mlp": nn.Sequential(*layers), "head": nn.Linear(24, 5)})


def forward(model, x):
    return model["head"](model["mlp"](x))


def with_kept_weights(model):
    model = convert(model, "fp8_tile", kernels=KERNELS)
    QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def with_adapters(base, mode=None):
    def make(model):
        add_lora(model, 2, base=base, kernels=KERNELS)
        return convert(model, mode, kernels=KERNELS) if mode else model

    return make


def in_chunks(model):
    chunk_mlps(model, 2, lambda text: None)
    return model


def integers(model):
    model["head"] = Int8Linear.from_linear(model["head"])
    return model


MODELS = {
    **{
        mode: lambda model, mode=mode: convert(model, mode, kernels=KERNELS)
        for mode in ("bf16_mixed", "tf32", "fp8_tile")
    },
    "pure_fp16": lambda model: convert(model, "pure_fp16", kernels=KERNELS),
    "kept_fp8": with_kept_weights,
    "lora_keep": with_adapters("keep"),
    "lora_fp8": with_adapters("fp8"),
    "lora_fp8_converted": with_adapters("fp8", "fp8_tile"),
    "chunks": in_chunks,
    "int8": integers,
}
AVERAGES = {
    "swa": {},
    "ema": {"avg_fn": get_ema_avg_fn(0.9)},
    "ema_multi": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "own": {"avg_fn": lambda average, value, _: average + (value - average) / 2},
}


@pytest.mark.parametrize(("kind", "average", "use_buffers"), covering(tuple(MODELS), tuple(AVERAGES), (False, True)))
def test_an_average_is_that_of_the_weights(kind, average, use_buffers):
    """Against the same average of plain tensors; codes and integers stay what they are."""
    model = MODELS[kind](net())
    averaged = AveragedModel(model, use_buffers=use_buffers, **AVERAGES[average])
    plain = nn.Module()
    for index, param in enumerate(model.parameters()):
        plain.register_parameter(f"p{index}", nn.Parameter(param.detach().clone(), requires_grad=False))
    reference = AveragedModel(plain, **AVERAGES[average])
    fixed = {name: value.clone() for name, value in model.state_dict().items() if value.dtype in FIXED}
    for step in range(3):
        torch.manual_seed(step)
        forward(model, torch.randn(6, 24)).float().square().sum().backward()
        with torch.no_grad():
            for param, copied in zip(model.parameters(), plain.parameters(), strict=True):
                param.add_(torch.randn_like(param)) if param.requires_grad else None
                copied.copy_(param)
        averaged.update_parameters(model)
        reference.update_parameters(plain)
    for (name, got), want in zip(averaged.module.named_parameters(), reference.module.parameters(), strict=True):
        assert torch.equal(got, want), name
    for name, value in fixed.items():
        assert torch.equal(averaged.module.state_dict()[name].view(torch.uint8), value.view(torch.uint8)), name
    assert averaged.module.state_dict().keys() == model.state_dict().keys()
    averaged.eval()
    assert forward(averaged.module, torch.randn(3, 24)).isfinite().all()


FIXED = (torch.float8_e4m3fn, torch.int8)


def test_a_model_averaged_before_its_weights_are_kept():
    """The copy has no FP8 data, the model has: their buffers must still be the same ones."""
    model = convert(net(), "fp8_tile", kernels=KERNELS)
    averaged = AveragedModel(model, use_buffers=True)
    QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        averaged.update_parameters(model)
    assert [name for name, _ in averaged.module.named_buffers()] == [name for name, _ in model.named_buffers()]
    for name, value in copy.deepcopy(model).state_dict().items():
        assert torch.equal(averaged.module.state_dict()[name], value), name
