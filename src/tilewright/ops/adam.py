"""adam: one AdamW step over lists of tensors, in place, with states of FP32 or BF16.

For each tensor, in FP32 (decoupled decay, Loshchilov and Hutter 2019; order of operations as in torch.optim.AdamW):
    p <- p * (1 - lr * weight_decay)
    m <- m + (1 - beta1) * (g - m);   v <- beta2 * v + (1 - beta2) * g^2
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
BF16 targets (states or parameters) are written with stochastic rounding: the expectation of what is
stored is the FP32 value, so updates below half a BF16 step are not lost. The random bits are a hash of
(seed, step, element), so a resumed run draws the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tilewright.core.hardware import Machine
from tilewright.ops.dispatch import Candidate, Case, Op, always


@dataclass(frozen=True)
class AdamHyper:
    """Hyperparameters of one step. `step` counts from 1;"""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    seed: int


def hash_bits(count: int, stream: int, device: torch.device) -> Tensor:
    """16 random bits an element as int32, a pure function of (element, stream): a 32-bit integer finaliser."""
    x = torch.arange(count, dtype=torch.int32, device=device) * -1640531527 + stream
    x = (x ^ ((x >> 16) & 0xFFFF)) * 569420461
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 1935289751
    return (x ^ ((x >> 15) & 0x1FFFF)) & 0xFFFF


def stochastic_round_bf16(x: Tensor, stream: int) -> Tensor:
    """x (FP32, flat) rounded to BF16, up or down with probability by distance; non-finite values stay.

    Example:
        >>> x = torch.full((100_000,), 1.0 + 2**-9)
        >>> abs(stochastic_round_bf16(x, 7).float().mean().item() - x[0].item()) < 1e-4
        True
    """
    bits = x.view(torch.int32) + hash_bits(x.numel(), stream, x.device)
    rounded = (bits & -65536).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)


def _stream(hyper: AdamHyper, index: int, target: int) -> int:
    """A different 31-bit stream for each (seed, step, tensor, target)."""
    value = (hyper.seed * 0x9E3779B1 + hyper.step) * 0x85EBCA6B + index * 0xC2B2AE35 + target * 0x27D4EB2F
    value ^= value >> 17
    return (value * 0x165667B1 & 0x7FFFFFFF) - 0x40000000


def _store(target: Tensor, value: Tensor, stream: int) -> None:
    if target.dtype == torch.bfloat16:
        target.copy_(stochastic_round_bf16(value.reshape(-1), stream).view_as(target))
    else:
        target.copy_(value)


def ref_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    hyper: AdamHyper,
) -> None:
    """The law, one tensor at a time."""
    correction1 = 1 - hyper.beta1**hyper.step
    correction2 = (1 - hyper.beta2**hyper.step) ** 0.5
    for index, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        high = torch.promote_types(param.dtype, torch.float32)
        g = grad.to(high)
        m = exp_avg.to(high).lerp(g, 1 - hyper.beta1)
        v = exp_avg_sq.to(high) * hyper.beta2 + (1 - hyper.beta2) * g * g
        p = param.to(high) * (1 - hyper.lr * hyper.weight_decay)
        p = p - hyper.lr / correction1 * m / (v.sqrt() / correction2 + hyper.eps)
        _store(exp_avg, m, _stream(hyper, index, 1))
        _store(exp_avg_sq, v, _stream(hyper, index, 2))
        _store(param, p, _stream(hyper, index, 0))


def native_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    hyper: AdamHyper,
) -> None:
    """torch's fused AdamW where parameters and states share a wide dtype, else the reference."""
    if any(m.dtype != p.dtype or p.dtype in (torch.bfloat16, torch.float16) for p, m in zip(params, exp_avgs, strict=True)):
        ref_adam(params, grads, exp_avgs, exp_avg_sqs, hyper)
        return
    steps = [torch.tensor(float(hyper.step - 1), device=p.device) for p in params]
    adamw(
        list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), [], steps,
        foreach=False, capturable=False, differentiable=False, fused=True, has_complex=False, amsgrad=False,
        beta1=hyper.beta1, beta2=hyper.beta2, lr=hyper.lr, weight_decay=hyper.weight_decay, eps=hyper.eps, maximize=False,
    )  # fmt: skip


def _needs_wide(machine: Machine, case: Case) -> str | None:
    if case.dtype in (torch.bfloat16, torch.float16):
        return "torch's fused AdamW rounds 16-bit parameters to nearest, which loses small updates"
    return None


ADAM = Op("adam", (Candidate("native", native_adam, _needs_wide), Candidate("ref", ref_adam, always)))
