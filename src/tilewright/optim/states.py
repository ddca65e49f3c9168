"""States of DeepSeekAdam for each parameter, by format, and which saved states it can take.

A saved state fits where its tensors have the names, shapes and dtypes of this optimizer's own: then it is loaded as it
is, without a cast. torch.optim.AdamW's is such a state where its moments have the dtype that they have here. Any other
is refused with both formats named; a silent cast would lose bits, or read codes as numbers.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.formats import quadratic_map
from tilewright.ops.base.tensor_parts import beside
from tilewright.optim.param_groups import TORCH_SETTINGS, find_problems

Moments = Literal["fp32", "bf16", "8bit"]
Master = Literal["fp32", "split24", "stochastic"]
Layout = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each state by name, without the count of steps."""

_MOMENTS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "8bit"}


@dataclass(frozen=True)
class StateFormat:
    """Storage of the moments, and what is kept of a 16-bit parameter too. See `DeepSeekAdam`."""

    moments: Moments
    master: Master
    second: bool = True
    """There is a second moment; a matrix of Muon's has a momentum alone."""

    def __str__(self) -> str:
        return f'moments="{self.moments}", master="{self.master}"'

    def layout(self, shape: torch.Size, dtype: torch.dtype) -> Layout:
        """Layout of optimizer states of a parameter of this shape and dtype."""
        return _layout(self, shape, dtype)


def check_formats(moments: str, master: str) -> None:
    """Check formats of optimizer states: raise where these do not exist, or do not go together.

    Raises:
        ConfigError: see above.
    """
    got = f"moments={moments!r}, master={master!r}"
    if moments not in get_args(Moments) or master not in get_args(Master):
        need = f"moments one of {get_args(Moments)}, master one of {get_args(Master)}"
        raise ConfigError(
            "Unknown format of optimizer states", got=got, need=need, try_='moments="fp32", master="fp32"'
        )
    if master == "split24" and moments != "8bit":
        need = 'moments="8bit", whose kernels read and write 24-bit weights'
        raise ConfigError('master="split24" needs other moments', got=got, need=need, try_='moments="8bit"')


@functools.lru_cache(maxsize=4096)  # it is compared with the states of every parameter in every step
def _layout(format: StateFormat, shape: torch.Size, dtype: torch.dtype) -> Layout:
    wide = torch.promote_types(dtype, torch.float32)
    layout: dict[str, tuple[torch.Size, torch.dtype]]
    if format.moments == "8bit":
        scales = (torch.Size(quadratic_map.scale_shape(shape)), torch.float32)
        layout = {
            "exp_avg": (shape, torch.int8),
            "exp_avg_scale": scales,
            "exp_avg_sq": (shape, torch.uint8),
            "exp_avg_sq_scale": scales,
        }
    else:
        moment = torch.bfloat16 if format.moments == "bf16" else wide
        layout = {"exp_avg": (shape, moment), "exp_avg_sq": (shape, moment)}
    if not format.second:
        layout = {name: kept for name, kept in layout.items() if not name.startswith("exp_avg_sq")}
    if format.master == "fp32" and dtype != wide:
        layout["master"] = (shape, wide)
    if format.master == "split24" and dtype == torch.bfloat16:
        layout["low"] = (shape, torch.int8)
    return layout


def fits(state: Mapping[str, Any], layout: Layout) -> bool:
    """True if an optimizer state has the tensors of this layout and a step count, and nothing else."""
    if len(state) != len(layout) + 1 or "step" not in state:
        return False
    for name, (shape, dtype) in layout.items():
        value = state.get(name)
        if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != shape:
            return False
    return True


def described(state: Mapping[str, Any]) -> str:
    """An optimizer state in words.

    Example:
        >>> described({"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)})
        'fp32 moments of shape (3,), no masters'
    """
    moment = state.get("exp_avg")
    if not isinstance(moment, Tensor):
        return f"tensors named {', '.join(map(str, state)) or 'nothing'}"
    number = "moments" if "exp_avg_sq" in state else "momentum"
    moments = f"{_MOMENTS.get(moment.dtype, str(moment.dtype))} {number} of shape {tuple(moment.shape)}"
    more = {"exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "step", "master", "low"}
    master = "FP32 masters" if "master" in state else "the last 8 of 24 bits" if "low" in state else "no masters"
    return ", ".join([moments, master, *sorted(map(str, state.keys() - more))])


def of_layout(layout: Layout) -> str:
    """A layout of optimizer states in words."""
    return described({name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in layout.items()})


def loadable(
    saved: Mapping[str, Any], params: Sequence[Tensor], formats: Sequence[StateFormat]
) -> dict[Tensor, dict[str, Any]]:
    """Convert the states of a `state_dict` for loading, by parameter, each on its parameter's device; nothing is
    changed.

    Args:
        saved: of DeepSeekAdam, or of torch's AdamW.
        params: in the order of the groups; as many as are saved.
        formats: that the states must have, one for each of `params`.

    Raises:
        CheckpointError: a state has another format or shape.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    states: dict[Tensor, dict[str, Any]] = {}
    for param, format, number in zip(params, formats, numbers, strict=True):
        state = saved["state"].get(number)
        if not state:
            continue
        layout = format.layout(param.shape, param.dtype)
        if not fits(state, layout):
            raise CheckpointError(
                "Saved optimizer states of another format",
                got=f"parameter {number}: {described(state)}",
                need=f"{of_layout(layout)} ({format})",
                try_="DeepSeekAdam(..., moments=..., master=...) as the states were saved; or do not load them, which\n"
                "begins the moments at zero",
            )
        step = torch.tensor(int(state["step"]), dtype=torch.int64)  # torch's is FP32
        states[param] = {"step": step, **{name: beside(state[name], param) for name in layout}}
    return states


def readable(
    groups: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]], *, has_muon: bool
) -> list[dict[str, Any]]:
    """Readable groups beside saved optimizer states, without the settings of torch's AdamW that are not read here.

    Args:
        groups: as they were saved.
        present: the optimizer's own.
        has_muon: the optimizer is `Muon`.

    Raises:
        CheckpointError: the groups are of another law than AdamW's, or than Muon's where the optimizer's own are; or
            have settings that the optimizer cannot follow.
    """
    taken = []
    for number, (group, own) in enumerate(zip(groups, present, strict=True)):
        if bool(group.get("muon")) != bool(own.get("muon")):
            raise CheckpointError(
                "Saved states of another optimizer",
                got=f"group {number}: states of {_law(group)}",
                need=f"states of {_law(own)}",
                try_="the optimizer and the parameter groups that the states were saved with; or do not load them",
            )
        if own.get("muon"):
            group = {**group, "stacks": own["stacks"]}  # it tells of the parameters, not of the update
        problems = find_problems(group, f"group {number} of the saved states", muon=has_muon)
        if problems:
            raise CheckpointError.from_problems(problems)
        taken.append({name: value for name, value in group.items() if name not in TORCH_SETTINGS})
    return taken


def _law(group: Mapping[str, Any]) -> str:
    return "Muon" if group.get("muon") else "AdamW"
