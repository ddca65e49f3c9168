"""What DeepSeekAdam keeps of each parameter, by format, and which saved states it can take.

A saved state fits where its tensors have the names, shapes and dtypes of this optimizer's own: then it is loaded as it
is, without a cast. torch.optim.AdamW's is such a state where its moments have the dtype that they have here. Any other
is refused with both formats named; a silent cast would lose bits, or read codes as numbers. Older 8-bit
states had the scales of the flat tensor; they get those of its rows (`scales_by_row`).
"""

import functools
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tilewright.core.errors import CheckpointError
from tilewright.formats import quadratic_map
from tilewright.optim.shards import beside

Moments = Literal["fp32", "bf16", "8bit"]
Master = Literal["fp32", "split24", "stochastic"]
Layout = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each state by name, without the count of steps."""

_MOMENTS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "8bit"}
_HYPER = ("lr", "betas", "eps", "weight_decay")
_TORCHS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Settings of torch's AdamW that are not read here."""


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
        """The states of a parameter of this shape and dtype."""
        return _layout(self, shape, dtype)


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
    """Whether a state has the tensors of this layout, and a count of steps, and nothing else."""
    if len(state) != len(layout) + 1 or "step" not in state:
        return False
    for name, (shape, dtype) in layout.items():
        value = state.get(name)
        if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != shape:
            return False
    return True


def described(state: Mapping[str, Any]) -> str:
    """A state in words.

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
    """A layout in the same words."""
    return described({name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in layout.items()})


def loadable(
    saved: Mapping[str, Any], params: Sequence[Tensor], formats: Sequence[StateFormat]
) -> dict[Tensor, dict[str, Any]]:
    """The states of a `state_dict` by parameter, each on its parameter's device; nothing is changed.

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
        state = scales_by_row(state)
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


def update_scales(param: Tensor, state: MutableMapping[str, Any]) -> None:
    """Give a state that was loaded in place the scales of its rows, beside its parameter. See `scales_by_row`.

    Codes of an older checkpoint may be sharded already, its scales are whole then: where rows are no number of whole
    blocks, all ranks wait for each other.
    """
    scales = [name for name in ("exp_avg_scale", "exp_avg_sq_scale") if name in state]
    if all(state[name].ndim == 2 for name in scales):
        return
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    made = scales_by_row(whole)
    state.update({name: beside(value, param) for name, value in made.items() if name != "step"})


def scales_by_row(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved state whose 8-bit moments have scales [R, B]; as it is, where they have them already.

    Where a row is a number of whole blocks, codes and scales stay as they are. Elsewhere values are rounded once more,
    to the nearest code of their new block.
    """
    made = dict(state)
    for name in ("exp_avg", "exp_avg_sq"):
        qdata, scale = state.get(name), state.get(f"{name}_scale")
        if not isinstance(qdata, Tensor) or not isinstance(scale, Tensor):
            continue
        if scale.shape != (quadratic_map.num_blocks(qdata.numel()),):
            continue
        rows, blocks = quadratic_map.scale_shape(qdata.shape)
        if rows * blocks * quadratic_map.BLOCK == qdata.numel():
            made[f"{name}_scale"] = scale.view(rows, blocks)
            continue
        value_RK = quadratic_map.decode(qdata.reshape(-1), scale).view(rows, -1)
        middle_RK = torch.full(value_RK.shape, 127, dtype=torch.int32, device=qdata.device)
        again_RK, made[f"{name}_scale"] = quadratic_map.encode(value_RK, middle_RK, signed=qdata.dtype == torch.int8)
        made[name] = again_RK.view(qdata.shape)
    return made


def readable(groups: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Saved parameter groups without the settings of torch's AdamW that are not read here.

    Args:
        groups: as they were saved.
        present: the optimizer's own.

    Raises:
        CheckpointError: the groups are of another law than AdamW's, or than Muon's where the optimizer's own are.
    """
    for number, (group, own) in enumerate(zip(groups, present, strict=True)):
        if bool(group.get("muon")) != bool(own.get("muon")):
            raise CheckpointError(
                "Saved states of another optimizer",
                got=f"group {number}: states of {_law(group)}",
                need=f"states of {_law(own)}",
                try_="the optimizer and the parameter groups that the states were saved with; or do not load them",
            )
        missing = [name for name in _HYPER if name not in group]
        coupled = group.get("decoupled_weight_decay") is False and group["weight_decay"] if not missing else False
        other = [name for name in ("amsgrad", "maximize") if group.get(name)]
        if missing or coupled or other:
            raise CheckpointError(
                "Saved states of another optimizer than AdamW",
                got=f"group {number}: "
                + (f"no {', '.join(missing)}" if missing else f"{other[0]}=True" if other else "coupled weight decay"),
                need=f"groups with {', '.join(_HYPER)}; decoupled decay, neither amsgrad nor maximize",
                try_="begin the optimizer's states at zero: do not load them",
            )
    return [{name: value for name, value in group.items() if name not in _TORCHS} for group in groups]


def _law(group: Mapping[str, Any]) -> str:
    return "Muon" if group.get("muon") else "AdamW"
