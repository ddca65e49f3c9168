"""Codes are a module's state and no numbers: what is done with models finds them, and what computes with "all
parameters and buffers" does not."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel

from tests.models.shapes import KERNELS
from tilewright.ops.base.code_modules import named_codes, named_constants, own_tensors
from tilewright.precision.float8.frozen_linear import freeze_in_fp8
from tilewright.precision.integer.linear import Int8Linear


def fp8(layer):
    freeze_in_fp8(layer, KERNELS)
    return layer


KINDS = {"int8": Int8Linear.from_linear, "fp8": fp8}
CODES = {"int8": {"1.qdata", "1.scale"}, "fp8": {"1.weight", "1.weight_scale_inv"}}


def net(kind, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 24), KINDS[kind](nn.Linear(24, 12)), nn.Linear(12, 3))


def same(model, want):
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(model.state_dict().values(), want.state_dict().values(), strict=True)
    )


X = torch.randn(5, 20, generator=torch.Generator().manual_seed(9))


def assert_as(model, want):
    """Equal state and output."""
    assert model.state_dict().keys() == want.state_dict().keys()
    assert same(model, want)
    assert torch.equal(model(X), want(X))


def by_pickle(model, other):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_checkpoint(model, other):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    return other


def by_dcp(model, other):
    set_model_state_dict(other, copy.deepcopy(get_model_state_dict(model)))
    return other


def from_meta(model, other):
    other = other.to("meta")
    assert all(tensor.is_meta for tensor in (*other.parameters(), *named_constants(other).values()))
    other = other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    return other


def from_meta_assigned(model, other):
    other = other.to("meta")
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return other


WAYS = {
    "deepcopy": lambda model, other: copy.deepcopy(model),
    "pickle": by_pickle,
    "load_state_dict": lambda model, other: other.load_state_dict(model.state_dict()) and other,
    "assign": lambda model, other: other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True) and other,
    "checkpoint": by_checkpoint,
    "dcp": by_dcp,
    "to_empty": from_meta,
    "from meta, assigned": from_meta_assigned,
    "half and back": lambda model, other: other.half().float().load_state_dict(model.state_dict()) and other,
    "share_memory": lambda model, other: copy.deepcopy(model).share_memory(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_as_it_was(kind, way):
    model, other = net(kind), net(kind, 1)
    want = copy.deepcopy(model)
    other(X)
    assert_as(WAYS[way](model, other), want)
    assert_as(model, want)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_state_and_neither_parameters_nor_buffers(kind):
    model = net(kind)
    plain = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert {name for name, _ in named_codes(model)} == CODES[kind]
    assert model.state_dict().keys() == plain | CODES[kind]
    assert not plain & CODES[kind]
    assert own_tensors(model[1]).keys() == {name.partition(".")[2] for name in CODES[kind]} | {"bias"}
    dtypes = {name: codes.dtype for name, codes in named_codes(model)}
    assert {name: codes.dtype for name, codes in named_codes(model.bfloat16())} == (
        dtypes if kind == "fp8" else dtypes | {"1.scale": torch.bfloat16}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_that_do_not_fit_are_refused_as_torch_refuses_buffers(kind):
    model, state = net(kind), net(kind, 1).state_dict()
    name = sorted(CODES[kind])[0]
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
        model.load_state_dict({key: value for key, value in state.items() if key != name})
    missing = model.load_state_dict({}, strict=False)
    assert set(missing.missing_keys) == set(before.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(state | {"1.other": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state | {name: state[name][:1]})


@pytest.mark.parametrize("kind", KINDS)
def test_what_computes_with_all_parameters_and_buffers_leaves_codes_alone(kind):
    """Noise on all, and an average of many steps."""
    model = net(kind)
    codes = {name: value.clone() for name, value in named_codes(model)}
    averaged = AveragedModel(model, use_buffers=True)
    for _ in range(3):
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(torch.randn_like(tensor))
        averaged.update_parameters(model)
    for found in (model, averaged.module):
        for name, value in named_codes(found):
            assert torch.equal(value.view(torch.uint8), codes[name].view(torch.uint8)), name
    assert averaged.module(X).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_models_read_the_codes_of_now(kind):
    model, other = net(kind), net(kind, 1)
    compiled = torch.compile(model)
    assert torch.allclose(compiled(X), model(X), rtol=2.0**-6, atol=2.0**-6)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert torch.allclose(compiled(X), other(X), rtol=2.0**-6, atol=2.0**-6)
