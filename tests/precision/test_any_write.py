"""After any write that PyTorch allows, a converted model gives what a model gives that is converted after the write."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.precision.writes import WAYS, Case
from tilewright.ops.base.compile import compile_options
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert, evaluating, set_mode
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.policy.gemm_formats import SCALED_FORMATS

KERNELS = Kernels.default()
WIDTH = 136  # no multiple of a tile
NOT_COMPILED = {"a forward pre-hook"}  # hooks made after compiling are not compiled
if torch.__version__.startswith("2.11"):
    NOT_COMPILED |= {"another memory layout"}  # torch 2.11 has no guard on a parameter's strides: an AssertionError


def linears() -> nn.Sequential:
    """Without anything that a compiler could fuse and round elsewhere."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 72))


def converted(mode):
    torch.manual_seed(0)
    model = linears()
    convert(model, mode, kernels=KERNELS)
    return model


def managed(mode):
    model = converted(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    QuantizedWeights(model, optimizer)
    return Case(model, optimizer, torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1)))


def results(model, x):
    """Output and gradients."""
    x = x.clone().requires_grad_()
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])]


def fresh_results(values, mode, x):
    model = linears()
    model.load_state_dict(values)
    convert(model, mode, kernels=KERNELS)
    return results(model, x)


def check(model, mode, x, said):
    mine = results(model, x)
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names = ("output", "dx", *values)
    for name, got, want in zip(names, mine, fresh_results(values, mode, x), strict=True):
        worst = (got.float() - want.float()).abs().max().item()
        assert torch.equal(got, want), f"{said}: {name} is off by up to {worst}"


ONE_EACH = {(way, SCALED_FORMATS[turn % len(SCALED_FORMATS)]) for turn, way in enumerate(WAYS)}
"""By default each way is tried in one mode, in turn."""


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        pytest.param(way, mode, marks=() if (way, mode) in ONE_EACH else pytest.mark.slow)
        for way in WAYS
        for mode in SCALED_FORMATS
    ],
)
def test_a_write_is_seen(way, mode):
    case = managed(mode)
    check(case.model, mode, case.x, "before")
    for times in ("once", "twice"):
        WAYS[way](case)
        check(case.model, mode, case.x, f"{way}, {times}")


@pytest.mark.parametrize(
    "mode",
    [mode if mode == "fp8_tile" else pytest.param(mode, marks=pytest.mark.slow) for mode in SCALED_FORMATS],
)
def test_a_write_is_seen_by_compiled_code(mode):
    torch.compiler.reset()
    case = managed(mode)
    compiled = torch.compile(case.model, fullgraph=True, options=compile_options())
    start = {name: value.clone() for name, value in case.model.state_dict().items()}
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=512):
        for way in (name for name in WAYS if name not in NOT_COMPILED):
            WAYS[way](case)
            values = {name: value.detach().clone() for name, value in case.model.state_dict().items()}
            for got, want in zip(results(compiled, case.x), fresh_results(values, mode, case.x), strict=True):
                # Compiled, the gradient of a bias is a sum over the rows in another order.
                beyond = len(case.x) * torch.finfo(torch.float32).eps * want.abs().max() if want.ndim == 1 else 0.0
                assert (got - want).abs().max() <= beyond, way
            case.weight.data = case.weight.data.contiguous()
            case.model.load_state_dict(start)


@pytest.mark.parametrize("mode", SCALED_FORMATS)
def test_a_write_between_forward_and_backward_is_an_error_or_of_no_consequence(mode):
    """As in plain PyTorch: the gradient of a weight that was written is refused where the write is seen."""
    case = managed(mode)
    loss = case.model(case.x).sum()
    with torch.no_grad():
        case.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "mode",
    [mode if mode in ("fp8_tile", "nvfp4") else pytest.param(mode, marks=pytest.mark.slow) for mode in SCALED_FORMATS],
)
def test_compiled_layers_run_twice_before_their_backward(mode):
    torch.compiler.reset()
    case = managed(mode)
    compiled = torch.compile(case.model, fullgraph=True, options=compile_options())
    grads = []
    for model in (case.model, compiled):
        (model(case.x).sum() + 2 * model(3 * case.x).sum()).backward()
        grads.append([param.grad.clone() for param in case.model.parameters()])
        case.model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("mode", SCALED_FORMATS)
def test_other_weights_for_one_call_leave_nothing_behind(mode):
    case = managed(mode)
    others = {name: -3 * param.detach() for name, param in case.model.named_parameters()}
    want = results(case.model, case.x)
    x = case.x.clone().requires_grad_()
    out = case.model(x)
    there = functional_call(case.model, others, (case.x,))  # between forward and backward
    grads = torch.autograd.grad(out.float().square().sum(), [x, *case.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip([out.detach(), *grads], want, strict=True))
    assert torch.equal(there, fresh_results(others, mode, case.x)[0])
    check(case.model, mode, case.x, "after functional_call")


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _saved(model),
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("mode", SCALED_FORMATS)
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_a_model_of_its_own(kind, mode):
    case = managed(mode)
    case.model(case.x)
    twin = COPIES[kind](case.model)
    assert all(module.weight_store is None for module in twin)
    check(twin, mode, case.x, "copy")
    torch.optim.SGD(twin.parameters(), lr=1.0).step(lambda: _loss(twin, case.x))
    check(twin, mode, case.x, "trained copy")
    check(case.model, mode, case.x, "original")
    QuantizedWeights(twin, torch.optim.SGD(twin.parameters(), lr=1.0))
    check(twin, mode, case.x, "managed copy")


def _loss(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def test_averaged_weights_are_those_of_the_average():
    case = managed("fp8_tile")
    average = torch.optim.swa_utils.AveragedModel(case.model)
    QuantizedWeights(average.module, torch.optim.SGD(average.parameters()))
    for _ in range(3):
        WAYS["the optimizer's step"](case)
        average.update_parameters(case.model)
        check(average.module, "fp8_tile", case.x, "average")


@pytest.mark.parametrize("mode", SCALED_FORMATS)
@pytest.mark.parametrize("other", ["bf16_mixed", "fp8_tile", "fp8_tensorwise", "evaluating"])
def test_modes_there_and_back(mode, other):
    case = managed(mode)
    case.model(case.x)
    if other == "evaluating":
        with evaluating(case.model):
            WAYS["numpy"](case)
            case.model(case.x)
    else:
        set_mode(case.model, other)
        WAYS["numpy"](case)
        case.model(case.x)
        set_mode(case.model, mode)
    check(case.model, mode, case.x, other)


def test_moving_and_casting_the_model():
    case = managed("fp8_tile")
    for move in (lambda m: m.bfloat16(), lambda m: m.float(), lambda m: m.double(), lambda m: m.to(torch.float32)):
        move(case.model)
        dtype = case.weight.dtype
        values = {name: value.clone() for name, value in case.model.state_dict().items()}
        model = linears().to(dtype)
        model.load_state_dict(values)
        convert(model, "fp8_tile", kernels=KERNELS)
        for parameter in model.parameters():
            assert parameter.dtype in (dtype, torch.float32)
        assert torch.equal(case.model(case.x), model(case.x)), dtype
