"""Parameter groups: which parameters decay, which are Muon's, and what a group's settings may be.

Matrices decay, vectors (norms, biases) do not. Muon has a group of its own for matrices of hidden layers.

A group is checked when it is made or loaded, and before each update, as schedulers and users write into it. A key is
one of four kinds:
    a setting that the optimizer reads: its value must be in range;
    a setting of torch's optimizers that is not read here (`maximize`, `fused`): a value that changes nothing is
        accepted, any other is refused;
    a record that schedulers keep there (`initial_lr`, `max_momentum`), or a `name`: accepted, not read;
    anything else: refused, as it may be a misspelt setting.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn

from tilewright.core.errors import ConfigError, Problem


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups by decay, two in the model's own order: trainable parameters of two or more dims with it, the
    rest without."""
    return _groups([param for param in model.parameters() if param.requires_grad], weight_decay)


def muon_groups(
    model: nn.Module, matrices: Iterable[Tensor], weight_decay: float, *, stacks: bool = False
) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`: the trainable ones of `matrices`, with decay; and those of `decay_groups` for the
    rest.

    Args:
        model: whose parameters are trained.
        matrices: that Muon updates: `models.base.hidden_matrices`.
        weight_decay: decoupled decay, as a rate.
        stacks: parameters of three dims among `matrices` are stacks of matrices [E, R, C], as those that
            `hidden_matrices` finds are. (The weight of a convolution has three dims too, and is none.)
    """
    chosen = set(matrices)
    trainable = [param for param in model.parameters() if param.requires_grad]
    hidden = {
        "params": [p for p in trainable if p in chosen],
        "weight_decay": weight_decay,
        "muon": True,
        "stacks": stacks,
    }
    return [hidden, *_groups([p for p in trainable if p not in chosen], weight_decay)]


def _groups(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


# ---- what settings may be ----


@dataclass(frozen=True)
class Setting:
    """A rule for an optimizer setting: in words, as a test, and a usual value."""

    need: str
    holds: Callable[[Any], bool]
    usual: str


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and _rate(float(value))
    return _number(value) and value >= 0


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value < 1


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


ADAM_SETTINGS: dict[str, Setting] = {
    "lr": Setting("a finite number of at least 0, or a tensor of one", _rate, "lr=1e-3"),
    "betas": Setting(
        "two numbers of at least 0 and below 1",
        lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_share, value)),
        "betas=(0.9, 0.95)",
    ),
    "eps": Setting("a finite number above 0", lambda value: _number(value) and value > 0, "eps=1e-8"),
    "weight_decay": Setting(
        "a finite number of at least 0", lambda value: _number(value) and value >= 0, "weight_decay=0.1"
    ),
}
"""Settings of every group."""

MUON_SETTINGS: dict[str, Setting] = {
    "momentum": Setting("a number of at least 0 and below 1", _share, "momentum=0.95"),
    "nesterov": Setting("True or False", _flag, "nesterov=True"),
    "num_steps": Setting(
        "an integer from 1 to 99", lambda value: type(value) is int and 1 <= value <= 99, "num_steps=5"
    ),
    "adjust_lr": Setting(
        '"match_rms_adamw" or "original"',
        lambda value: isinstance(value, str) and value in ("match_rms_adamw", "original"),
        'adjust_lr="match_rms_adamw"',
    ),
    "stacks": Setting("True or False", _flag, "stacks=True"),
}
"""Further settings of groups with `"muon": True`."""

_MUON_FLAG = {"muon": Setting("True or False", _flag, '"muon": True')}


@dataclass(frozen=True)
class _Foreign:
    """A setting of torch's optimizers that ours lacks: the values at which it changes nothing (also False and None),
    and another way."""

    harmless: tuple[bool, ...]
    instead: str


_ADAMW = "torch.optim.AdamW, which has it"
TORCH_SETTINGS: Mapping[str, _Foreign] = {
    "foreach": _Foreign((True,), ""),
    "fused": _Foreign((True,), ""),
    "maximize": _Foreign((), "minimise the negative of the loss"),
    "amsgrad": _Foreign((), _ADAMW),
    "capturable": _Foreign((), _ADAMW),
    "differentiable": _Foreign((), _ADAMW),
    "decoupled_weight_decay": _Foreign((True,), "weight_decay=0.0, or the decoupled decay that is used here"),
}
"""Settings of torch's optimizers that are not read here. `foreach` and `fused` choose between implementations of one
result; decay is decoupled here."""
_RECORDS = frozenset(
    {f"{prefix}_{name}" for prefix in ("initial", "base", "max", "min", "swa") for name in ADAM_SETTINGS}
    | {"base_momentum", "max_momentum", "lr_scale", "name", "param_names", "params"}
)
"""Entries that schedulers of torch and timm keep in a group, and names."""


def check_settings(settings: Mapping[str, Any], where: str, *, muon: bool) -> None:
    """Check settings of a parameter group: raise where an optimizer cannot follow them, or these arguments.

    Args:
        settings: by name; "params" among them or not.
        where: of the settings, in words.
        muon: the optimizer is `Muon`, not `DeepSeekAdam`.

    Raises:
        ConfigError: all that is wrong, each setting with its name.
    """
    if problems := find_problems(settings, where, muon=muon):
        raise ConfigError.from_problems(problems)


def find_problems(settings: Mapping[str, Any], where: str, *, muon: bool) -> list[Problem]:
    """Find problems in settings of parameter groups; arguments as in `check_settings`."""
    optimizer = "Muon" if muon else "DeepSeekAdam"
    required = ADAM_SETTINGS | MUON_SETTINGS if muon and settings.get("muon") is True else ADAM_SETTINGS
    known = required | _MUON_FLAG if muon else required
    problems = [
        Problem(f"{optimizer} lacks a setting", f"no {name}", setting.need, setting.usual, where)
        for name, setting in required.items()
        if name not in settings
    ]
    for name, value in settings.items():
        if name in known:
            if not known[name].holds(value):
                what = f"{optimizer} cannot use this {name}"
                problems.append(Problem(what, f"{name}={value!r}", known[name].need, known[name].usual, where))
        elif name in TORCH_SETTINGS:
            problems += _foreign(name, value, settings, optimizer, where)
        elif name in ("muon", "stacks") and value is False:
            continue  # it is not Muon's
        elif name not in _RECORDS:
            problems.append(_unknown(name, value, known, optimizer, where))
    return problems


def _foreign(name: str, value: Any, settings: Mapping[str, Any], optimizer: str, where: str) -> list[Problem]:
    rule = TORCH_SETTINGS[name]
    coupled = name == "decoupled_weight_decay" and value is False and settings.get("weight_decay") != 0
    if value is None or (value is False and not coupled) or (isinstance(value, bool) and value in rule.harmless):
        return []
    what = f"{optimizer} has decoupled decay only" if coupled else f"{optimizer} has no {name}"
    need = " or ".join(map(str, (None, True) if coupled else (False, None, *rule.harmless)))
    return [Problem(what, f"{name}={value!r}", need, rule.instead or f"{name}=None", where)]


def _unknown(name: Any, value: Any, known: Mapping[str, Setting], optimizer: str, where: str) -> Problem:
    what, got = f"{optimizer} does not know the setting {name}", f"{name}={value!r}"
    if name in MUON_SETTINGS or name == "muon":
        try_ = '"muon": True in it, or take it out' if optimizer == "Muon" else "tilewright.Muon, or take it out"
        return Problem(what, f"{got} in a group of AdamW", ", ".join(known), try_, where)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    try_ = f"{close[0]}, if that was meant" if close else 'take it out; "name" may hold a label'
    return Problem(what, got, ", ".join(known), try_, where)
