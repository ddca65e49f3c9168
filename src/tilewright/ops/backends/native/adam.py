"""AdamW by torch's fused kernel, and by torch.compile of the reference where states or weights are BF16."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

from tilewright.ops.backends.ref.adam import AdamHyper, Update, update, update_all
from tilewright.ops.backends.ref.follow_writes import PIECE, Follower
from tilewright.ops.base.compile import compile_options


def fused(
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
    """Update by torch's fused Adam: parameters, gradients and moments of one wide dtype. Nothing is rounded, so
    `numbers`, `firsts` and `skips` are not read.

    The kernel goes through memory as it lies: tensors whose elements are in different orders, or apart, take copies.
    On CPUs it takes the elements after the last whole vector one by one, with other last bits, so these take copies
    too: an element's bits do not depend on how much of its tensor is here.

    Masters go by pieces, so that a piece of a master is compared with its weight, updated and stored as it while the
    cache has it. All memory is taken before anything is written.
    """
    if weights:
        grads = [grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)]
    given: list[Row] = list(zip(params, grads, exp_avgs, exp_avg_sqs, *([weights] if weights else []), strict=True))
    alike = [_alike(row) for row in given]
    ends = {place: _end(row) for place, row in enumerate(alike) if row[0].device.type == "cpu" and _rest(row[0])}
    rows = [_beginning(row) if place in ends else row for place, row in enumerate(alike)]
    rows += [copies for _, copies in ends.values()]
    if weights:
        rows = [piece for row in rows for piece in _pieces(row)]
    counted = float(hyper.step - 1)  # the kernel counts up itself
    counts = {
        device: torch.full((len(rows),), counted, device=device).unbind() for device in {p.device for p in params}
    }
    steps = [counts[row[0].device][place] for place, row in enumerate(rows)]
    if weights:
        follow = Follower([(row[0], row[_WEIGHT]) for row in rows])
        for row, step in zip(rows, steps, strict=True):
            master, weight = row[0], row[_WEIGHT]
            follow(master, weight)
            _update([row], [step], hyper)
            weight.copy_(master)
    else:
        _update(rows, steps, hyper)
    for end, copies in ends.values():
        for place in _written(end):
            end[place].copy_(copies[place][: len(end[place])])
    for tensors, row in zip(given, alike, strict=True):
        if row is not tensors:
            for place in _written(row):
                tensors[place].copy_(row[place])


def _update(rows: Sequence["Row"], steps: Sequence[Tensor], hyper: AdamHyper) -> None:
    adamw(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2] for row in rows],
        [row[3] for row in rows],
        [],
        list(steps),
        fused=True,
        amsgrad=False,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=False,
    )


_VECTOR = 16
"""Elements: a multiple of what any CPU takes at a time."""
_WEIGHT = 4
"""Place of a master's weight in a row."""
Row = tuple[Tensor, ...]
"""Parameter, gradient and moments, and of a master its weight."""


def _written(row: Row) -> tuple[int, ...]:
    """Places of what torch's Adam writes."""
    return (0, 2, 3, _WEIGHT)[: len(row) - 1]


def _alike(row: Row) -> Row:
    """Give the tensors of a row one order of memory without gaps for torch's Adam: as they are, or contiguous
    copies."""
    if all(tensor.is_contiguous() for tensor in row):
        return row
    if len({tensor.stride() for tensor in row}) == 1 and _is_dense(row[0]):
        return row
    return tuple(tensor.contiguous() for tensor in row)


def _is_dense(tensor: Tensor) -> bool:
    """True if a tensor for torch's Adam is dense: elements that do not overlap fill a stretch of memory."""
    return 1 + sum(d * (size - 1) for d, size in zip(tensor.stride(), tensor.shape, strict=True)) == tensor.numel()


def _rest(tensor: Tensor) -> int:
    """The elements of a tensor after the last whole vector, for torch's Adam."""
    return tensor.numel() % _VECTOR


def _beginning(row: Row) -> Row:
    """The whole vectors at the beginning of tensors without gaps, in the order of memory, for torch's Adam."""
    return tuple(_in_memory(tensor)[: tensor.numel() - _rest(tensor)] for tensor in row)


def _end(row: Row) -> tuple[Row, Row]:
    """End of tensors for torch's Adam: the elements behind whole vectors, and copies of them that are filled up to
    one."""
    end = tuple(_in_memory(tensor)[tensor.numel() - _rest(tensor) :] for tensor in row)
    return end, tuple(F.pad(part, (0, _VECTOR - len(part))) for part in end)


def _pieces(row: Row) -> Iterator[Row]:
    """Pieces of tensors for torch's Adam, without gaps, cut as they lie in memory."""
    size = PIECE * torch.get_num_threads()
    return zip(*(_in_memory(tensor).split(size) for tensor in row), strict=True)


def _in_memory(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


@functools.cache
def _compiled_update() -> Update:
    return torch.compile(update, dynamic=True, options=compile_options())


def compiled(*lists: Any, **more: Any) -> None:
    """Compile the reference's Adam update with torch, into one loop over each tensor: it takes the arguments of
    `update_all` behind its first."""
    update_all(_compiled_update(), *lists, **more)
