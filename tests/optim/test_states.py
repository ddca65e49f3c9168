"""Copies, pickles and saved states of DeepSeekAdam: they continue with the same bits, or are refused in words."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.optim.test_adam import FORMATS
from tests.optim.test_citizen import EVERY_FORMAT, HYPER, assert_in_words, grads_of, normal, train, two_of, uncompiled
from tilewright.core.errors import CheckpointError
from tilewright.formats import quadratic_map
from tilewright.optim.adam import DeepSeekAdam

# ---- copies ----


def net(dtype):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(normal(*param.shape, seed=seed))
    return model.to(dtype)


def run_net(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        x = normal(4, 6, seed=20 + step).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_torch_save(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": through_torch_save,
    "pickle of a deepcopy": lambda pair: pickle.loads(pickle.dumps(copy.deepcopy(pair))),
}


@EVERY_FORMAT
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_model_and_optimizer_trains_on_by_itself(way, dtype, options):
    """The copied optimizer updates the copied parameters, with the same bits; the original is not touched."""
    model, options = net(dtype), uncompiled(options)
    optimizer = DeepSeekAdam([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}],
                             **HYPER, **options, seed=3)  # fmt: skip
    run_net(model, optimizer, 2)
    copied, its_optimizer = COPIES[way]((model, optimizer))
    assert all(param in set(copied.parameters()) for group in its_optimizer.param_groups for param in group["params"])
    before = copy.deepcopy(model.state_dict())
    run_net(copied, its_optimizer, 2, start=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} of the original changed"
    run_net(model, optimizer, 2, start=2)
    for (name, value), other in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert torch.equal(value, other), f"{name} differs"
    assert its_optimizer.num_updates == optimizer.num_updates


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_the_optimizer_alone_has_its_own_parameters(way):
    optimizer, first, _ = two_of(DeepSeekAdam)
    train(optimizer, first, grads_of(first))
    other = COPIES[way](optimizer)
    its = other.param_groups[0]["params"][0]
    assert its is not first
    assert torch.equal(train(other, its, grads_of(its)), train(optimizer, first, grads_of(first)))


# ---- states of other formats ----


def stepped(dtype, options, cls=DeepSeekAdam, **more):
    param = nn.Parameter(normal(300).to(dtype))
    optimizer = cls([param], **HYPER, **options, **more)
    train(optimizer, param, grads_of(param))
    return param, optimizer


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_states_of_one_format_into_another(source, target):
    """Equal layouts continue with the same bits; others are refused with both formats named, and nothing is loaded."""
    saved, first = stepped(*FORMATS[source])
    dtype, options = FORMATS[target]
    param = nn.Parameter(saved.detach().to(dtype))
    second = DeepSeekAdam([param], **HYPER, **options)
    state = copy.deepcopy(first.state_dict())
    if layout_of(source) == layout_of(target):
        second.load_state_dict(state)
        assert second.state[param]["exp_avg"].dtype == first.state[saved]["exp_avg"].dtype
        train(second, param, grads_of(param))
        return
    with pytest.raises(CheckpointError) as caught:
        second.load_state_dict(state)
    moments = {"fp32": "fp32", "bf16": "bf16", "8bit": "8bit"}
    ours, theirs = options.get("moments", "fp32"), FORMATS[source][1].get("moments", "fp32")
    assert_in_words(caught.value, f"{moments[theirs]} moments", f"{moments[ours]} moments", "moments=")
    assert not second.state, "some states were loaded"


def layout_of(name):
    dtype, options = FORMATS[name]
    param = torch.empty(300, dtype=dtype, device="meta")
    return DeepSeekAdam([nn.Parameter(param)], **options).state_layout(param)


@pytest.mark.parametrize("steps", [0, 3])
def test_states_of_adamw_go_on_in_fp32(steps):
    theirs = nn.Parameter(normal(300))
    adamw = torch.optim.AdamW([theirs], **HYPER, foreach=False)
    train(adamw, theirs, grads_of(theirs, steps))
    ours = nn.Parameter(theirs.detach().clone())
    optimizer = DeepSeekAdam([ours], lr=1.0)
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in HYPER} == HYPER
    assert "amsgrad" not in group, "an option that nobody reads"
    got, want = train(optimizer, ours, grads_of(ours)), train(adamw, theirs, grads_of(theirs))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    again = nn.Parameter(ours.detach().clone())
    DeepSeekAdam([again]).load_state_dict(optimizer.state_dict())


OTHERS = {
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
    "maximize": (torch.optim.AdamW, {"maximize": True}, "maximize"),
    "adam with decay": (torch.optim.Adam, {"weight_decay": 0.1}, "decoupled"),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "betas"),
    "adamax": (torch.optim.Adamax, {}, "exp_inf"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_states_of_other_laws_are_refused(other):
    cls, options, word = OTHERS[other]
    theirs = nn.Parameter(normal(5))
    optimizer = cls([theirs], **options)
    train(optimizer, theirs, grads_of(theirs))
    ours = DeepSeekAdam([nn.Parameter(normal(5))])
    with pytest.raises(CheckpointError) as caught:
        ours.load_state_dict(optimizer.state_dict())
    assert_in_words(caught.value, word)
    assert not ours.state
    assert ours.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(("dtype", "options"), [v for k, v in FORMATS.items() if k not in ("fp32", "stochastic")])
def test_states_of_adamw_do_not_fit_other_formats(dtype, options):
    _, adamw = stepped(dtype, {}, torch.optim.AdamW)
    param = nn.Parameter(normal(300).to(dtype))
    with pytest.raises(CheckpointError) as caught:
        DeepSeekAdam([param], **options).load_state_dict(adamw.state_dict())
    assert_in_words(caught.value, "moments")


def test_a_state_of_another_shape_is_refused():
    state = stepped(torch.float32, {})[1].state_dict()
    other = DeepSeekAdam([nn.Parameter(torch.ones(299))])
    with pytest.raises(CheckpointError) as caught:
        other.load_state_dict(state)
    assert_in_words(caught.value, "(300,)", "(299,)")


def test_hooks_of_loading_see_and_change_the_states():
    """A hook before may edit what is loaded; one after finds the states in their own formats."""
    param, source = stepped(*FORMATS["8bit"])
    target = DeepSeekAdam([nn.Parameter(param.detach().clone())], **FORMATS["8bit"][1])
    seen = []

    def rename(_, state_dict):
        state_dict["state"] = {0: {name.removeprefix("old_"): v for name, v in state_dict["state"][0].items()}}

    target.register_load_state_dict_pre_hook(rename)
    target.register_load_state_dict_post_hook(lambda opt: seen.extend(v.dtype for v in opt.state.popitem()[1].values()))
    state = source.state_dict()
    state["state"] = {0: {f"old_{name}": value for name, value in state["state"][0].items()}}
    target.load_state_dict(state)
    assert seen == [value.dtype for value in source.state[param].values()]


# ---- states with scales of another shape ----


@pytest.mark.parametrize("shape", [(6, 256), (3, 4, 64), (6, 100), (2, 3, 50)])
def test_scales_of_the_flat_tensor_are_refused(shape):
    """Codes mean nothing under the scales of other blocks."""
    param = nn.Parameter(normal(*shape))
    optimizer = DeepSeekAdam([param], **HYPER, moments="8bit")
    train(optimizer, param, grads_of(param))
    saved = optimizer.state_dict()
    flat = torch.ones(quadratic_map.num_blocks(param.numel()))
    state = dict(saved["state"][0]) | {"exp_avg_scale": flat, "exp_avg_sq_scale": flat}
    other = DeepSeekAdam([nn.Parameter(param.detach().clone())], moments="8bit")
    with pytest.raises(CheckpointError) as caught:
        other.load_state_dict({**saved, "state": {0: state}})
    assert_in_words(caught.value)
    assert not other.state
