"""Uses that PyTorch allows of any optimizer: each equals a reference, or is refused in words.

Memory layouts are compared with the same numbers in contiguous tensors, in every format of the states; FP32 is compared
with torch.optim.AdamW too.
"""

import copy

import pytest
import torch
from torch import nn

from tests.optim.test_adam import FORMATS
from tilewright.core.errors import ConfigError, TilewrightError
from tilewright.core.hardware import detect_machine
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam

HYPER = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
EVERY_FORMAT = pytest.mark.parametrize(("dtype", "options"), FORMATS.values(), ids=FORMATS)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grads_of(param, count=3):
    return [normal(*param.shape, seed=10 + step) for step in range(count)]


def uncompiled(options):
    """BF16 moments without the compiler, which takes its time; tests/ops compare the two."""
    choice = {"adam": "ref"} if options.get("moments") == "bf16" else {}
    return options | {"kernels": Kernels(detect_machine("cpu"), choice)}


def train(optimizer, param, grads):
    for grad in grads:
        param.grad = grad.to(param.dtype)
        optimizer.step()
    return param.detach().clone(memory_format=torch.contiguous_format)


def assert_in_words(error, *words):
    """Four parts, and what they must name."""
    problem = error.problems[0]
    assert problem.got, error
    assert problem.need, error
    assert problem.try_, error
    for word in words:
        assert word in str(error), f"{word!r} is not named in:\n{error}"


# ---- memory layouts ----

LAYOUTS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "every_second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "inside_another": lambda x: nn.functional.pad(x, (1, 2))[..., 1:-2],
    "offset": lambda x: torch.cat([torch.zeros(3, dtype=x.dtype), x.flatten()])[3:].view(x.shape),
}


@EVERY_FORMAT
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout_equals_contiguous(layout, dtype, options):
    """Gradients are contiguous, as a loop that fills them gives them; states are loaded from contiguous ones too."""
    options = uncompiled(options)
    plain = nn.Parameter(normal(4, 6, 3, 5).to(dtype))
    other = nn.Parameter(LAYOUTS[layout](plain.detach().clone()))
    assert torch.equal(plain, other)
    grads = grads_of(plain, 4)
    first, second = DeepSeekAdam([plain], **HYPER, **options), DeepSeekAdam([other], **HYPER, **options)
    for some in (grads[:2], grads[2:]):
        worst = (train(first, plain, some) - train(second, other, some)).abs().max().item()
        assert worst == 0, f"{layout} is off by {worst}"
        second.load_state_dict(copy.deepcopy(first.state_dict()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout_equals_adamw(layout):
    ours, theirs = (nn.Parameter(LAYOUTS[layout](normal(4, 6, 3, 5))) for _ in range(2))
    grads = [LAYOUTS[layout](grad) for grad in grads_of(ours)]
    got = train(DeepSeekAdam([ours], **HYPER), ours, grads)
    want = train(torch.optim.AdamW([theirs], **HYPER, foreach=False), theirs, grads)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@EVERY_FORMAT
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (1, 1, 1)])
def test_scalars_and_tensors_without_elements(shape, dtype, options):
    """Beside a parameter that has some, which must move as if it were alone."""
    options = uncompiled(options)
    alone, beside, small = (nn.Parameter(normal(*size).to(dtype)) for size in ((40,), (40,), shape))
    grads = grads_of(alone)
    optimizer = DeepSeekAdam([beside, small], **HYPER, **options)
    start = small.detach().clone()
    small.grad = torch.ones_like(small)
    got = train(optimizer, beside, grads)
    assert torch.equal(got, train(DeepSeekAdam([alone], **HYPER, **options), alone, grads))
    assert small.shape == start.shape
    assert not small.numel() or not torch.equal(small, start)


# ---- gradients and parameters that are refused ----


def expanded():
    return nn.Parameter(torch.ones(1).expand(5))


def overlapping():
    return nn.Parameter(torch.ones(6).as_strided((3, 3), (1, 1)))


def complex_numbers():
    return nn.Parameter(torch.ones(3, dtype=torch.complex64))


REFUSED_PARAMETERS = {
    "expanded": (expanded, ("share memory", "(5,)", "clone")),
    "overlapping": (overlapping, ("share memory", "clone")),
    "complex": (complex_numbers, ("complex64", "view_as_real")),
}


@pytest.mark.parametrize("options", [{}, {"moments": "bf16"}, {"moments": "8bit"}], ids=["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("case", REFUSED_PARAMETERS)
def test_parameters_that_cannot_be_updated_are_refused(case, options):
    make, words = REFUSED_PARAMETERS[case]
    param = make()
    before = param.detach().clone()
    with pytest.raises(ConfigError) as caught:
        train(DeepSeekAdam([param], **options), param, [torch.ones(param.shape)])
    assert_in_words(caught.value, *words)
    assert torch.equal(param, before)


@EVERY_FORMAT
def test_sparse_gradients_are_refused(dtype, options):
    table = nn.Embedding(7, 3, sparse=True).to(dtype)
    dense = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = DeepSeekAdam([dense, table.weight], **options)
    (table(torch.tensor([1, 1, 4])).sum() * dense.sum()).backward()
    before = dense.detach().clone(), table.weight.detach().clone()
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    assert_in_words(caught.value, "sparse", "(7, 3)", "sparse=False")
    assert torch.equal(dense, before[0]), "some were updated"
    assert torch.equal(table.weight, before[1])


@EVERY_FORMAT
def test_a_gradient_of_another_shape_is_refused(dtype, options):
    """As after `param.data` was replaced by a larger tensor: 8-bit kernels would read past its end."""
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = DeepSeekAdam([param], **options)
    with pytest.raises(ConfigError) as caught:
        optimizer.step_params([param], [torch.ones(3)])
    assert_in_words(caught.value, "(3,)", "(4,)")


@pytest.mark.parametrize("change", ["dtype", "shape", "device"])
@EVERY_FORMAT
def test_a_parameter_that_changed_under_its_states_is_refused(dtype, options, change):
    """`model.half()`, `model.to(device)` or `param.data = ...` after the first step."""
    param = nn.Parameter(torch.ones(300, dtype=dtype))
    optimizer = DeepSeekAdam([param], **uncompiled(options))
    train(optimizer, param, grads_of(param, 1))
    before = optimizer.state_layout(param)
    param.grad = None
    if change == "dtype":
        param.data = param.data.to(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
    elif change == "shape":
        param.data = torch.ones(900, dtype=dtype)
    else:
        state = optimizer.state[param]
        state |= {name: value.to("meta") for name, value in state.items() if name != "step"}
    param.grad = torch.ones_like(param)
    if change == "dtype" and optimizer.state_layout(param) == before:
        optimizer.step()  # the same states belong to weights of either dtype
        assert param.isfinite().all()
        return
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    assert_in_words(caught.value, "states", "state.pop(param)")


# ---- groups ----


def two_of(cls, **options):
    first, second = nn.Parameter(normal(5, 4)), nn.Parameter(normal(7, seed=1))
    return cls([first, second], **HYPER, **options), first, second


def replaced(cls):
    """A parameter is replaced in its group, and its states begin again."""
    optimizer, first, second = two_of(cls)
    train(optimizer, first, grads_of(first))
    new = nn.Parameter(normal(2, 3, seed=2))
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state.pop(first)
    train(optimizer, new, grads_of(new))
    return [new, train(optimizer, second, grads_of(second)), optimizer.state_dict()["state"][0]["exp_avg"]]


def reordered(cls):
    optimizer, first, second = two_of(cls)
    train(optimizer, first, grads_of(first))
    optimizer.param_groups[0]["params"].reverse()
    return [train(optimizer, second, grads_of(second)), train(optimizer, first, grads_of(first))]


def removed(cls):
    optimizer, first, second = two_of(cls)
    first.grad = torch.ones_like(first)
    del optimizer.param_groups[0]["params"][0]
    return [train(optimizer, second, grads_of(second)), first]


def moved(cls):
    """From one group to another, with another learning rate."""
    optimizer, first, second = two_of(cls)
    optimizer.add_param_group({"params": [nn.Parameter(normal(3, seed=5))], "lr": 0.5})
    train(optimizer, first, grads_of(first))
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))
    return [train(optimizer, first, grads_of(first)), train(optimizer, second, grads_of(second))]


def added_later(cls):
    optimizer, first, second = two_of(cls)
    train(optimizer, first, grads_of(first))
    late = nn.Parameter(normal(6, seed=4))
    optimizer.add_param_group({"params": late, "weight_decay": 0.0, "lr": 0.2})
    return [train(optimizer, late, grads_of(late)), train(optimizer, second, grads_of(second)), first]


def named(cls):
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.copy_(normal(3, 4))
        layer.bias.copy_(normal(3))
    optimizer = cls(layer.named_parameters(), **HYPER)
    train(optimizer, layer.weight, grads_of(layer.weight))
    return [layer.weight, optimizer.param_groups[0]["param_names"]]


def frozen(cls):
    """A parameter that needs no gradient, of a dtype that no AdamW updates."""
    counts = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    weight = nn.Parameter(normal(3))
    return [train(cls([counts, weight], **HYPER), weight, grads_of(weight)), counts]


def closure(cls):
    """Called once a step with gradients on, its loss returned."""
    param = nn.Parameter(normal(4))
    optimizer = cls([param], **HYPER)

    def compute():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():  # a closure has gradients all the same
        losses = [optimizer.step(compute).detach() for _ in range(3)]
    return [param, *losses]


def rate_as_a_tensor(cls):
    optimizer, first, _ = two_of(cls)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    return [train(optimizer, first, grads_of(first))]


def scheduled(cls):
    optimizer, first, _ = two_of(cls)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for grad in grads_of(first, 5):
        first.grad = grad
        optimizer.step()
        schedule.step()
    return [first, torch.tensor(optimizer.param_groups[0]["initial_lr"])]


USES = (replaced, reordered, removed, moved, added_later, named, frozen, closure, rate_as_a_tensor, scheduled)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_use_equals_adamw(use):
    got, want = use(DeepSeekAdam), use(torch.optim.AdamW)
    for a, b in zip(got, want, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert a == b


def test_states_of_a_parameter_that_was_taken_out_are_named():
    optimizer, first, _ = two_of(DeepSeekAdam)
    train(optimizer, first, grads_of(first))
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError) as caught:
        optimizer.state_dict()
    assert_in_words(caught.value, "(5, 4)", "state.pop(param)")
    optimizer.state.pop(first)
    assert not optimizer.state_dict()["state"]


def test_a_parameter_of_another_optimizer_is_refused():
    stranger = nn.Parameter(torch.ones(3))
    stranger.grad = torch.ones(3)
    with pytest.raises(ConfigError) as caught:
        two_of(DeepSeekAdam)[0].step_params([stranger])
    assert_in_words(caught.value, "(3,)", "add_param_group")


@pytest.mark.parametrize("options", [{"master": "stochastic"}, {"moments": "8bit"}], ids=["stochastic", "8bit"])
def test_a_group_added_later_is_checked_like_the_first(options):
    dtype = torch.float16 if "master" in options else torch.float64
    optimizer = two_of(DeepSeekAdam, **options)[0]
    with pytest.raises(TilewrightError) as caught:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=dtype))]})
    assert_in_words(caught.value)
    assert len(optimizer.param_groups) == 1, "a refused group stays"


def test_an_optimizer_whose_parameters_never_get_a_gradient_says_so():
    """As after the model's parameters were replaced: everything would run, and nothing would learn."""
    optimizer = two_of(DeepSeekAdam)[0]
    with pytest.warns(UserWarning, match="none of its 2 parameters has a gradient"):
        optimizer.step()
