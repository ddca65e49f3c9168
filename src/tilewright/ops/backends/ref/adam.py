"""The reference for AdamW with FP32 or BF16 targets, one tensor at a time. See `ops.adam` for the formulas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.backends.ref.follow_writes import followed


@dataclass(frozen=True)
class AdamHyper:
    """Hyperparameters of one step; `step` counts from 1, `seed` is that of the stochastic rounding."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    seed: int

    def coefficients(self) -> Tensor:
        """Coefficients of an Adam update as one FP32 tensor, so that a compiled one serves every step: decay factor, 1
        - beta1, beta2, step size, root of the second bias correction, eps."""
        correction1 = 1 - self.beta1**self.step
        correction2 = (1 - self.beta2**self.step) ** 0.5
        decay = 1 - self.lr * self.weight_decay
        return torch.tensor([decay, 1 - self.beta1, self.beta2, self.lr / correction1, correction2, self.eps])

    def streams(self, number: int, first: int = 0) -> Tensor:
        """The numbers of Adam's random streams for the tensor of this number: three int32, for the parameter and its
        two moments."""
        return torch.tensor([self.stream(number, target, first) for target in range(3)], dtype=torch.int32)

    def stream(self, number: int, target: int = 0, first: int = 0) -> int:
        """The number of one random stream of Adam: int32, as Python's integer.

        `hash_of` multiplies the element and adds the stream, so the `first` elements that come before a shard are part
        of its stream: its elements, counted from 0, get the bits that they have in the whole tensor.
        """
        value = ((self.seed * 0x9E3779B1 + self.step) * 0x85EBCA6B + number * 0xC2B2AE35 + target * 0x27D4EB2F) % 2**32
        whole = ((value ^ value >> 17) * 0x165667B1 & 0x7FFFFFFF) - 0x40000000
        return (whole + first * _ELEMENT + 2**31) % 2**32 - 2**31


_ELEMENT = -1640531527

Update = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]


def hash32(count: int, stream: Tensor | int, device: torch.device) -> Tensor:
    """Draw 32 random bits per element for Adam's rounding, a pure function of (element, stream)."""
    return hash_of(torch.arange(count, dtype=torch.int32, device=device), stream)


def elements(count: int, length: int, skip: int, device: torch.device) -> Tensor:
    """Number the elements of rows of this length for Adam's stochastic rounding, with `skip` numbers left out after
    each row (elements on other ranks): int32, which wraps.

    Example:
        >>> elements(4, 2, 3, torch.device("cpu")).tolist()
        [0, 1, 5, 6]
    """
    if not skip:
        return torch.arange(count, dtype=torch.int32, device=device)
    flat = torch.arange(count, dtype=torch.int64, device=device)
    return (flat + flat // length * skip).to(torch.int32)


def hash_of(element: Tensor, stream: Tensor | int) -> Tensor:
    """Hash the numbers of elements (int32) to random bits for Adam's rounding, by a 32-bit integer finaliser."""
    x = element * _ELEMENT + stream
    x = (x ^ ((x >> 16) & 0xFFFF)) * 569420461
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 1935289751
    return x ^ ((x >> 15) & 0x1FFFF)


def hash_bits(count: int, stream: Tensor | int, device: torch.device) -> Tensor:
    """Draw 16 random bits per element for Adam's rounding: the lower half of `hash32`."""
    return hash32(count, stream, device) & 0xFFFF


def stochastic_round_bf16(x: Tensor, stream: Tensor | int, element: Tensor | None = None) -> Tensor:
    """Round x (FP32, flat) to BF16 stochastically, up or down with probability by distance; non-finite values stay.
    `element`: numbers of its elements, from 0 on where None.

    Example:
        >>> x = torch.full((100_000,), 1.0 + 2**-9)
        >>> abs(stochastic_round_bf16(x, 7).float().mean().item() - x[0].item()) < 1e-4
        True
    """
    random = hash_bits(x.numel(), stream, x.device) if element is None else hash_of(element, stream) & 0xFFFF
    bits = x.view(torch.int32) + random
    rounded = (bits & -65536).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)


def _as_stored(value: Tensor, target: Tensor, stream: Tensor, element: Tensor | None) -> Tensor:
    return stochastic_round_bf16(value, stream, element) if target.dtype == torch.bfloat16 else value


def update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coefficients: Tensor,
    streams: Tensor,
    weight: Tensor | None = None,
    element: Tensor | None = None,
) -> None:
    """Update flat tensors of one length by Adam in place: the reference. Nothing changes before all memory is there.
    `element`: see `stochastic_round_bf16`."""
    decay, rate1, beta2, size, root_correction2, eps = coefficients.unbind()
    high = torch.promote_types(param.dtype, torch.float32)
    g = grad.to(high)
    m = exp_avg.to(high) + rate1 * (g - exp_avg.to(high))
    v = exp_avg_sq.to(high) * beta2 + (1 - beta2) * g * g
    held = param.to(high) if weight is None else followed(param, weight)
    p = held * decay - size * m / (v.sqrt() / root_correction2 + eps)
    targets = (param, exp_avg, exp_avg_sq)
    rows = zip((p, m, v), targets, streams.unbind(), strict=True)
    values = [_as_stored(value, target, stream, element) for value, target, stream in rows]
    if weight is not None:
        targets, values = (*targets, weight), [*values, p.to(weight.dtype)]
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def update_all(
    update_one: Update,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    numbers: Sequence[int],
    hyper: AdamHyper,
    firsts: Sequence[int] = (),
    weights: Sequence[Tensor] = (),
    skips: Sequence[int] = (),
) -> None:
    """Adam by the reference: `update_one` over lists of contiguous tensors."""
    coefficients = hyper.coefficients()
    firsts, skips = firsts or [0] * len(params), skips or [0] * len(params)
    lists = (params, grads, exp_avgs, exp_avg_sqs, *([weights] if weights else []))
    for number, first, skip, *tensors in zip(numbers, firsts, skips, *lists, strict=True):
        if not tensors[0].numel():  # a rank without rows, and no reason to compile
            continue
        device = tensors[0].device
        flat = [tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1) for tensor in tensors]
        element = elements(flat[0].numel(), tensors[0].shape[-1], skip, device) if skip else None
        streams, weight = hyper.streams(number, first).to(device), flat[4] if weights else None
        param, grad, exp_avg, exp_avg_sq = flat[:4]
        update_one(param, grad, exp_avg, exp_avg_sq, coefficients.to(device), streams, weight, element)
        for tensor, copy in zip(tensors, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(copy.view(tensor.shape))


def adam(*lists: Any, **more: Any) -> None:
    """Adam by the reference; see `ops.adam`: the arguments of `update_all` behind its first."""
    update_all(update, *lists, **more)
