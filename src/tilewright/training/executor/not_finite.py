"""Values that are not finite: whether there are some, and the error of a run that cannot get rid of them."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilewright.core.errors import NumericsError
from tilewright.optim.gradients import all_finite as values_finite


def not_finite_error(model: nn.Module, loss: float, steps: int) -> NumericsError:
    """The error of a run whose gradient stays non-finite, naming where that shows first."""
    bad_weights = list(_not_finite((name, param) for name, param in model.named_parameters()))
    named = [(name, param.grad) for name, param in model.named_parameters() if param.grad is not None]
    bad = list(_not_finite(reversed(named)))  # the backward pass runs from the last module to the first
    got = [f"loss {loss:.6g}; {len(bad)} of {len(named)} gradients are not finite"]
    if bad:
        got.append(f"first in backward order: {bad[0].rpartition('.')[0] or bad[0]} ({bad[0]})")
    if bad_weights:
        got.append(f"{len(bad_weights)} parameters are not finite themselves, the first is {bad_weights[0]}")
    return NumericsError(
        f"Non-finite gradient in {steps} steps in a row",
        got="\n".join(got),
        need="finite losses and gradients; the weights have not changed since the last good step",
        try_="optim.lr lower, optim.warmup_steps higher, or that module in FP32:\n"
        '[[precision.rules]] match = "NAME" compute = "fp32"',
    )


def all_finite(named: Iterable[tuple[str, Tensor]]) -> bool:
    """True where every floating-point tensor is finite."""
    return not any(True for _ in _not_finite((name, t) for name, t in named if t.is_floating_point()))


@torch.no_grad()
def _not_finite(named: Iterator[tuple[str, Tensor | None]]) -> Iterator[str]:
    return (name for name, tensor in named if tensor is not None and not _is_finite(tensor))


def _is_finite(tensor: Tensor) -> bool:  # on all ranks, of a tensor that is in parts
    return bool(values_finite([tensor]) if isinstance(tensor, DTensor) else torch.isfinite(tensor).all())
