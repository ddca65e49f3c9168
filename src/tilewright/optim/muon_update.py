"""One Muon update of one matrix, or of a stack of them, whatever its momentum and weights are stored in.

In FP32, with decoupled decay, in torch.optim.Muon's order of operations:
    m <- m + (1 - momentum) * (g - m);   u <- g + momentum * (m - g) (Nesterov), else m
    p <- p * (1 - lr * weight_decay) - lr * adjustment * newton_schulz(u)
Storage in 16, 24 and 8 bits is that of `ops.adam` and `ops.low_bit_adam`, rounded stochastically with bits of the same
hash, so a resumed run draws the same, and so does one that updates the matrices in another order.

Legend: N elements of the matrix, in its logical order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilewright.formats import quadratic_map
from tilewright.formats.rounding import join24, round_bf16, split24
from tilewright.ops.backends.native.newton_schulz import newton_schulz
from tilewright.ops.backends.ref.adam import AdamHyper, hash32

AdjustLr = Literal["match_rms_adamw", "original"]
Writes = list[tuple[Tensor, Tensor]]
"""Targets, and what is to be copied into them."""


@dataclass(frozen=True)
class MuonHyper:
    """Hyperparameters of one step. See `Muon`."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    num_steps: int
    adjust_lr: AdjustLr
    rounding: AdamHyper
    """Step and seed, from which the random bits of the rounding come."""


def lr_factor(shape: torch.Size, adjust_lr: AdjustLr) -> float:
    """What the learning rate of a matrix is multiplied by, since all singular values of its update are about 1.

    match_rms_adamw: 0.2 sqrt(max(R, C)); the update's root mean square is then that of AdamW's updates, about 0.2
    (arXiv 2502.16982, section 2.2). original: sqrt(max(1, R / C)).

    Example:
        >>> lr_factor(torch.Size([400, 100]), "match_rms_adamw"), lr_factor(torch.Size([400, 100]), "original")
        (4.0, 2.0)
    """
    rows, columns = shape[-2:]
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / max(1, columns)))


def update_matrix(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], number: int, hyper: MuonHyper) -> None:
    """Update a parameter and its states in place. Nothing changes before all memory is there.

    Args:
        param: [R, C], or [E, R, C].
        grad: of its shape, any float dtype.
        state: `exp_avg`, and what else its storage has. See `optim.states`.
        number: of the parameter, for the random stream.
        hyper: of this step.
    """
    target = state.get("master", param)
    wide = torch.promote_types(target.dtype, torch.float32)
    grad = grad.to(wide)
    momentum, writes = _next_momentum(state, grad, number, hyper)
    if hyper.nesterov:
        torch.lerp(grad, momentum, hyper.momentum, out=momentum)
    narrow = momentum.to(torch.bfloat16)
    del momentum  # the most memory is taken below
    direction = newton_schulz(narrow, hyper.num_steps).to(wide)
    del narrow
    decay, rate = 1 - hyper.lr * hyper.weight_decay, hyper.lr * lr_factor(param.shape, hyper.adjust_lr)
    if target.dtype == wide:  # from here on nothing takes memory
        target.mul_(decay).add_(direction, alpha=-rate)
    else:
        value = _value(target, state).mul_(decay).add_(direction, alpha=-rate)
        writes += _value_writes(target, value, state, number, hyper)
    if state["exp_avg"].dtype == wide:
        state["exp_avg"].lerp_(grad, 1 - hyper.momentum)
    for stored, new in writes:
        stored.copy_(new)
    if "master" in state:
        param.copy_(state["master"])


def _next_momentum(state: Mapping[str, Tensor], grad: Tensor, number: int, hyper: MuonHyper) -> tuple[Tensor, Writes]:
    """The momentum after this gradient, not rounded, and what is stored of it where it is in 16 or 8 bits."""
    exp_avg, rate = state["exp_avg"], 1 - hyper.momentum
    if exp_avg.dtype == grad.dtype:
        return exp_avg.lerp(grad, rate), []
    if "exp_avg_scale" not in state:
        value = exp_avg.to(grad.dtype).lerp_(grad, rate)
        value_N = value.reshape(-1)
        noise_N = _bits(value_N, number, hyper, 1) & 0xFFFF
        return value, [(exp_avg, round_bf16(value_N.float(), noise_N).view(value.shape))]
    value = quadratic_map.decode(exp_avg.reshape(-1), state["exp_avg_scale"]).view(exp_avg.shape).lerp_(grad, rate)
    value_N = value.reshape(-1)
    qdata_N, scale_B = quadratic_map.encode(value_N, _bits(value_N, number, hyper) >> 16 & 0xFF, signed=True)
    return value, [(exp_avg, qdata_N.view(value.shape)), (state["exp_avg_scale"], scale_B)]


def _value(target: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """FP32 weights of a BF16 target."""
    return join24(target, state["low"]) if "low" in state else target.to(torch.float32)


def _value_writes(target: Tensor, value: Tensor, state: Mapping[str, Tensor], number: int, hyper: MuonHyper) -> Writes:
    value_N = value.reshape(-1)
    if "low" in state:
        weight_N, low_N = split24(value_N, _bits(value_N, number, hyper) & 0xFF)
        return [(target, weight_N.view(value.shape)), (state["low"], low_N.view(value.shape))]
    return [(target, round_bf16(value_N, _bits(value_N, number, hyper) & 0xFFFF).view(value.shape))]


def _bits(value_N: Tensor, number: int, hyper: MuonHyper, stream: int = 0) -> Tensor:
    """32 random bits for each element."""
    return hash32(value_N.numel(), hyper.rounding.stream(number, stream), value_N.device)
