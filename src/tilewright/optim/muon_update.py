"""One Muon update of one matrix, or of a stack of them, whatever its momentum and weights are stored in.

In FP32, with decoupled decay, in torch.optim.Muon's order of operations:
    m <- m + (1 - momentum) * (g - m);   u <- g + momentum * (m - g) (Nesterov), else m
    p <- p * (1 - lr * weight_decay) - lr * adjustment * newton_schulz(u)
Storage in 16, 24 and 8 bits is that of `ops.adam` and `ops.low_bit_adam`, rounded stochastically with bits of the same
hash, so a resumed run draws the same, and so does one that updates the matrices in another order. It is read and
written `CHUNK` elements at a time, so that what rounding takes does not grow with the matrix.

Legend: N elements of the matrix, in its logical order  B blocks of 128 of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilewright.formats import quadratic_map
from tilewright.formats.rounding import join24, round_bf16, split24
from tilewright.ops.backends.native.newton_schulz import newton_schulz
from tilewright.ops.backends.ref.adam import AdamHyper, hash_of

AdjustLr = Literal["match_rms_adamw", "original"]
Writes = list[tuple[Tensor, Tensor]]
"""Targets, and what is to be copied into them."""
CHUNK = 2**18
"""Elements that are rounded at a time: whole blocks."""


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
    narrow = [momentum.to(torch.bfloat16)]
    del momentum
    direction = newton_schulz(narrow.pop(), hyper.num_steps).to(wide, memory_format=torch.contiguous_format)
    decay, rate = 1 - hyper.lr * hyper.weight_decay, hyper.lr * lr_factor(param.shape, hyper.adjust_lr)
    if target.dtype == wide:  # from here on nothing takes memory
        target.mul_(decay).add_(direction, alpha=-rate)
    else:
        writes += _rounded_weights(target, direction.mul_(-rate), decay, state, number, hyper)
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
    old_N, grad_N = exp_avg.reshape(-1), grad.reshape(-1)
    new_N, stored_N = torch.empty_like(grad_N), torch.empty_like(old_N)
    writes = [(exp_avg, stored_N.view(exp_avg.shape))]
    if exp_avg.dtype == torch.bfloat16:
        for part, bits in _chunks(new_N, number, hyper, stream=1):
            torch.lerp(old_N[part].to(grad.dtype), grad_N[part], rate, out=new_N[part])
            stored_N[part] = round_bf16(new_N[part].float(), bits & 0xFFFF)
        return new_N.view(grad.shape), writes
    scale_B, new_scale_B = state["exp_avg_scale"], torch.empty_like(state["exp_avg_scale"])
    for part, bits in _chunks(new_N, number, hyper):
        blocks = slice(part.start // quadratic_map.BLOCK, quadratic_map.num_blocks(part.stop))
        torch.lerp(quadratic_map.decode(old_N[part], scale_B[blocks]), grad_N[part], rate, out=new_N[part])
        noise = bits >> 16 & 0xFF
        stored_N[part], new_scale_B[blocks] = quadratic_map.encode(new_N[part], noise, signed=True)
    return new_N.view(grad.shape), [*writes, (scale_B, new_scale_B)]


def _rounded_weights(
    target: Tensor, change: Tensor, decay: float, state: Mapping[str, Tensor], number: int, hyper: MuonHyper
) -> Writes:
    """What is stored of BF16 weights, alone or with 8 bits more, times `decay` plus `change`."""
    target_N, change_N = target.reshape(-1), change.reshape(-1)
    weight_N = torch.empty_like(target_N)
    writes = [(target, weight_N.view(target.shape))]
    if "low" not in state:
        for part, bits in _chunks(target_N, number, hyper):
            value = target_N[part].to(torch.float32).mul_(decay).add_(change_N[part])
            weight_N[part] = round_bf16(value, bits & 0xFFFF)
        return writes
    low_N = state["low"].reshape(-1)
    new_low_N = torch.empty_like(low_N)
    for part, bits in _chunks(target_N, number, hyper):
        value = join24(target_N[part], low_N[part]).mul_(decay).add_(change_N[part])
        weight_N[part], new_low_N[part] = split24(value, bits & 0xFF)
    return [*writes, (state["low"], new_low_N.view(target.shape))]


def _chunks(x_N: Tensor, number: int, hyper: MuonHyper, stream: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Parts of a flat tensor, each with 32 random bits for each of its elements."""
    seed = hyper.rounding.stream(number, stream)
    for start in range(0, x_N.numel(), CHUNK):
        stop = min(start + CHUNK, x_N.numel())
        yield slice(start, stop), hash_of(torch.arange(start, stop, dtype=torch.int32, device=x_N.device), seed)
