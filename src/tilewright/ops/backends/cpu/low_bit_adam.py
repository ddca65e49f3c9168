"""AdamW on CPUs by a library in C++, in one pass, which also compares a master with its weight and stores it there.

With moments in 8 bits the bits are those of `ops.backends.ref.low_bit_adam`, in FP32 or BF16 those of
`ops.backends.ref.adam`.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops.backends.cpu.addresses import address
from tilewright.ops.backends.cpu.build import LOW_BIT_ADAM
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.ref.low_bit_adam import LowBitTensors, factors

_FP32, _BF16, _SPLIT24, _OF_BF16, _OF_FP16 = range(5)
"""What the library calls the kinds of target."""


def low_bit_adam(tensors: LowBitTensors, hyper: AdamHyper) -> None:
    """Low-bit AdamW on a CPU in C++, with moments in 8 bits: see `ops.adam`."""
    target, low, weight, grad = tensors.target, tensors.low, tensors.weight, tensors.grad
    if weight is not None:
        kind = _OF_BF16 if weight.dtype == torch.bfloat16 else _OF_FP16
    else:
        kind = _FP32 if target.dtype == torch.float32 else _BF16 if low is None else _SPLIT24
    qdata = (tensors.exp_avg, tensors.exp_avg_scale, tensors.exp_avg_sq, tensors.exp_avg_sq_scale)
    num_rows, length = tensors.rows
    LOW_BIT_ADAM.functions.tw_low_bit_adam(
        kind, grad.dtype == torch.float32, address(target), address(low), address(weight), address(grad),
        *(address(tensor) for tensor in qdata), num_rows, length, tensors.skip, *factors(hyper),
        tensors.stream(hyper), torch.get_num_threads(),
    )  # fmt: skip


def adam(
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
    """AdamW on a CPU in C++; see `ops.adam`: parameters and moments of FP32 or BF16."""
    floats = _floats(hyper)
    firsts, skips = firsts or [0] * len(params), skips or [0] * len(params)
    rows = zip(params, grads, exp_avgs, exp_avg_sqs, weights or [None] * len(params), strict=True)
    for number, first, skip, row in zip(numbers, firsts, skips, rows, strict=True):
        *_, weight = row
        tensors = row[:4] if weight is None else (*row[:4], weight)
        flat = [tensor.contiguous() for tensor in tensors]
        rounds = torch.bfloat16 in (flat[0].dtype, flat[2].dtype)  # the stream is for nothing else
        by_row = len(flat[0]) if rounds and skip else 1
        for at in range(by_row):  # the library numbers what it is given without gaps
            here = flat if by_row == 1 else [tensor[at] for tensor in flat]
            before = first + at * (here[0].numel() + skip)
            streams = [hyper.stream(number, target, before) if rounds else 0 for target in range(3)]
            _update(*here, floats=floats, streams=streams)
        for tensor, copy in zip(tensors, flat, strict=True):
            if copy is not tensor and tensor is not row[1]:
                tensor.copy_(copy)


@functools.lru_cache(maxsize=16)  # all tensors of a group and step have the same
def _floats(hyper: AdamHyper) -> list[float]:
    """The numbers of AdamW's formulas, each rounded to FP32."""
    coefficients = hyper.coefficients()
    decay, rate1, beta2, *rest = coefficients.tolist()
    return [decay, rate1, beta2, float(1 - coefficients[2]), *rest]


def _update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None = None,
    *,
    floats: Sequence[float],
    streams: Sequence[int],
) -> None:
    if weight is not None:
        kind = _OF_BF16 if weight.dtype == torch.bfloat16 else _OF_FP16
    else:
        kind = _FP32 if param.dtype == torch.float32 else _BF16
    if grad.dtype not in (torch.float32, torch.bfloat16):
        grad = grad.to(torch.float32)
    LOW_BIT_ADAM.functions.tw_adam(
        kind, exp_avg.dtype == torch.bfloat16, grad.dtype == torch.float32, address(param), address(weight),
        address(grad), address(exp_avg), address(exp_avg_sq), param.numel(), *floats, *streams,
        torch.get_num_threads(),
    )  # fmt: skip
