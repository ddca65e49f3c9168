"""Settings of groups: each is followed or refused in words, in whichever way it came into the group."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from tests.draws import examples
from tests.optim.test_citizen import assert_in_words, normal
from tilewright.core.errors import ConfigError, TilewrightError
from tilewright.core.hardware import detect_machine
from tilewright.models.base.hidden_matrices import hidden_matrices
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.muon import Muon
from tilewright.optim.param_groups import muon_groups

KERNELS = Kernels(detect_machine("cpu"), {})
TORCHS = Kernels(detect_machine("cpu"), {"newton_schulz": "native"})
"""With the bits of torch's Muon."""
BOTH = pytest.mark.parametrize("cls", [DeepSeekAdam, Muon])


def group_of(cls, own=()):
    muon = {"muon": True} if cls is Muon else {}
    return {"params": [nn.Parameter(normal(4, 3))], **muon, **dict(own)}


def make(cls):
    return cls([group_of(cls), {"params": [nn.Parameter(normal(5))]}], lr=0.01, kernels=KERNELS)


def in_the_constructor(cls, name, value):
    cls([group_of(cls)], kernels=KERNELS, **{name: value})


def in_a_group(cls, name, value):
    cls([group_of(cls, {name: value})], kernels=KERNELS)


def as_a_default_that_a_group_overrides(cls, name, value):
    own = make(cls).param_groups[0][name]
    cls([group_of(cls, {name: own})], kernels=KERNELS, **{name: value})


def in_a_later_group(cls, name, value):
    optimizer = make(cls)
    try:
        optimizer.add_param_group(group_of(cls, {name: value}))
    except TilewrightError:
        assert len(optimizer.param_groups) == 2, "a refused group stays"
        raise


def in_a_saved_state(cls, name, value):
    saved = make(cls).state_dict()
    saved["param_groups"][0][name] = value
    optimizer = make(cls)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    try:
        optimizer.load_state_dict(saved)
    except TilewrightError:
        assert optimizer.state_dict()["param_groups"] == before, "a refused state was loaded"
        raise


def written_between_steps(cls, name, value):
    optimizer = make(cls)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[0][name] = value
    try:
        optimizer.step()
    except TilewrightError:
        assert all(map(torch.equal, params, before)), "something was updated"
        raise


IN_GROUPS = (in_a_group, in_a_later_group, in_a_saved_state, written_between_steps)
WAYS = (in_the_constructor, as_a_default_that_a_group_overrides, *IN_GROUPS)

NO_NUMBERS = [math.nan, math.inf, -math.inf, "1e-3", None, True, 1j, [0.1]]
NO_RATES = [*NO_NUMBERS, -1, -1e-9, torch.tensor([0.1, 0.2])]
NO_SHARES = [*NO_NUMBERS, -0.1, 1, 1.5]
BAD = {
    "lr": [*NO_RATES, torch.tensor(-1.0), torch.tensor(math.nan)],
    "weight_decay": NO_RATES,
    "eps": [*NO_RATES, 0],
    "betas": [0.9, None, (0.9,), (0.9, 0.95, 0.99), "ab", *[(0.9, bad) for bad in NO_SHARES], (1.5, 0.9)],
}
BAD_OF_MUON = {
    "momentum": NO_SHARES,
    "nesterov": [1, 0, None, "yes"],
    "num_steps": [0, -1, 100, 2.5, True, "5", None],
    "adjust_lr": ["match_rms", "none", None, True, "Original", 1],
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@BOTH
def test_a_value_out_of_range_is_refused_however_it_comes(cls, way):
    for name, values in (BAD | (BAD_OF_MUON if cls is Muon else {})).items():
        for value in values:
            with pytest.raises(TilewrightError) as caught:
                way(cls, name, value)
            assert_in_words(caught.value, f"{name}=")


@pytest.mark.parametrize("way", IN_GROUPS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("flag", [1, 0, "yes", None])
def test_the_flags_of_muon_are_booleans(way, flag):
    # Of a saved group `stacks` is not read: it tells of the parameters that are there.
    for name in ("muon",) if way is in_a_saved_state else ("muon", "stacks"):
        with pytest.raises(TilewrightError):
            way(Muon, name, flag)


@examples(15)
@given(
    lr=st.floats(0, 1e3) | st.floats(0, 1, width=32).map(np.float32) | st.floats(0, 1, width=32).map(torch.tensor),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    eps=st.floats(1e-12, 1.0),
    weight_decay=st.floats(0, 1) | st.just(0),
    as_list=st.booleans(),
)
def test_values_in_range_are_taken_however_they_come(lr, betas, eps, weight_decay, as_list):
    values = {"lr": lr, "betas": list(betas) if as_list else betas, "eps": eps, "weight_decay": weight_decay}
    for cls in (DeepSeekAdam, Muon):
        for name, value in values.items():
            for way in WAYS:
                way(cls, name, value)


# ---- keys of other optimizers, schedulers and users ----

REFUSED = {
    "maximize": [True, 1, "yes"],
    "amsgrad": [True],
    "capturable": [True],
    "differentiable": [True],
    "fused": ["auto"],
    "decoupled_weight_decay": [False],
    "momentun": [0.9],
    "weight_decy": [0.0],
    "beta1": [0.9],
    "use_muon": [True],
    "adjust_lr_fn": ["original"],
    "grad_averaging": [False],
    7: [True],
}
HARMLESS = {
    **{key: (False, None) for key in ("maximize", "amsgrad", "capturable", "differentiable")},
    **{key: (False, None, True) for key in ("foreach", "fused")},
    "decoupled_weight_decay": (True, None),
    **{key: (0.5,) for key in ("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "lr_scale")},
    "name": ("decay",),
    "stacks": (False,),
}


@pytest.mark.parametrize("way", IN_GROUPS, ids=lambda way: way.__name__)
@BOTH
def test_what_would_have_no_effect_is_refused_by_name(cls, way):
    of_muon = {"momentum": [0.9], "num_steps": [5], "muon": [True], "stacks": [True]}
    unknown = REFUSED | ({} if cls is Muon or way is in_a_saved_state else of_muon)
    for name, values in unknown.items():
        for value in values:
            with pytest.raises(TilewrightError) as caught:
                way(cls, name, value)
            assert_in_words(caught.value, f"{name}=" if isinstance(name, str) else str(name), "need", "try")


@pytest.mark.parametrize("way", IN_GROUPS, ids=lambda way: way.__name__)
@BOTH
def test_what_changes_nothing_is_accepted(cls, way):
    for name, values in HARMLESS.items():
        for value in values:
            way(cls, name, value)


@BOTH
def test_a_group_may_say_that_it_is_not_of_muon(cls):
    cls([group_of(cls), {"params": [nn.Parameter(normal(3))], "muon": False, "stacks": False}])


@BOTH
def test_coupled_decay_is_harmless_where_there_is_none(cls):
    cls([group_of(cls, {"weight_decay": 0.0, "decoupled_weight_decay": False})])


def test_a_setting_of_muon_in_a_group_of_adamw_is_named():
    with pytest.raises(ConfigError) as caught:
        Muon([group_of(Muon), {"params": [nn.Parameter(normal(3))], "momentum": 0.9}])
    assert_in_words(caught.value, "momentum=0.9", '"muon": True', "parameter group 1")


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        DeepSeekAdam([group_of(DeepSeekAdam, {"lr": -1.0, "eps": 0, "maximize": True, "weight_decy": 0.1})])
    assert_in_words(caught.value, "lr=-1.0", "eps=0", "maximize=True", "weight_decy=0.1", "weight_decay, if")


@BOTH
def test_a_saved_group_without_a_setting_is_refused(cls):
    for name in ("lr", "betas", *(BAD_OF_MUON if cls is Muon else ())):
        saved = make(cls).state_dict()
        del saved["param_groups"][0][name]
        with pytest.raises(TilewrightError) as caught:
            make(cls).load_state_dict(saved)
        assert_in_words(caught.value, f"no {name}", "group 0")


SCHEDULES = {
    "one_cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=9),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "cosine": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "chained": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "swa": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pair", [(DeepSeekAdam, torch.optim.AdamW), (Muon, torch.optim.Muon)], ids=["adam", "muon"])
def test_schedulers_of_torch_write_into_the_groups(schedule, pair):
    """Rates and betas are followed as torch's own optimizers follow them, and saved groups load again."""
    if pair[0] is Muon and schedule in ("one_cycle", "cyclic"):
        pair = (Muon, None)  # torch's Muon has no momentum that these know
    ends = []
    for cls in filter(None, pair):
        group = group_of(cls)
        (param,) = group["params"]
        kind = {"kernels": TORCHS} if cls is Muon else {}
        kind = {"adjust_lr_fn": "match_rms_adamw"} if cls is torch.optim.Muon else kind
        kind |= {} if cls is torch.optim.Muon else {"betas": (0.9, 0.95)}
        optimizer = cls([group], lr=0.01, weight_decay=0.1, **kind)
        schedule_of = SCHEDULES[schedule](optimizer)
        for step in range(6):
            param.grad = normal(4, 3, seed=step)
            optimizer.step()
            schedule_of.step(*[1.0] if schedule == "plateau" else [])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        ends.append(param.detach())
    torch.testing.assert_close(ends[0], ends[-1], rtol=1e-5, atol=1e-6)


# ---- which parameters are Muon's ----


def test_muon_without_a_group_of_its_own_is_refused():
    matrices = [nn.Parameter(normal(4, 3))]
    for params in (matrices, [{"params": matrices}], iter([("w", matrices[0])])):
        with pytest.raises(ConfigError) as caught:
            Muon(params)
        assert_in_words(caught.value, '"muon": True', "muon_groups")
    Muon([{"params": matrices, "muon": False}])  # said


CONVOLUTION = nn.Conv1d(4, 6, 3)


def appended_to_a_group():
    optimizer = make(Muon)
    optimizer.param_groups[0]["params"].append(CONVOLUTION.weight)
    optimizer.step_params([CONVOLUTION.weight], [torch.ones(6, 4, 3)])


GIVEN = {
    "constructor": lambda: Muon([{"params": [CONVOLUTION.weight], "muon": True}]),
    "later": lambda: make(Muon).add_param_group({"params": CONVOLUTION.weight, "muon": True}),
    "named": lambda: Muon([{"params": CONVOLUTION.named_parameters(), "muon": True}]),
    "muon_groups": lambda: Muon(muon_groups(CONVOLUTION, [CONVOLUTION.weight], 0.1)),
    "appended": appended_to_a_group,
}


@pytest.mark.parametrize("way", GIVEN)
def test_three_dims_are_a_stack_only_where_the_group_says_it(way):
    with pytest.raises(ConfigError) as caught:
        GIVEN[way]()
    assert_in_words(caught.value, "(6, 4, 3)", '"stacks": True')


def test_hidden_matrices_are_never_a_convolution():
    """Of any kind, also with a parametrized weight; so the recipe's Muon may take three dims for experts."""
    kinds = [nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.ConvTranspose1d(4, 4, 3)]
    kinds += [
        nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)),
        nn.utils.parametrizations.orthogonal(nn.Conv1d(4, 4, 3)),
    ]
    model = nn.ModuleList([nn.Embedding(9, 4), *kinds, nn.Linear(4, 4), nn.Linear(4, 9)])
    assert {id(matrix) for matrix in hidden_matrices(model)} == {id(model[-2].weight)}
