"""Steps whose numbers are bad: how many in a row end a run, and the errors that say so."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilewright.core.errors import NumericsError
from tilewright.optim.gradients import all_finite as values_finite

MAX_BAD_STEPS = 3
NOT_FINITE = "the loss or its gradient is not finite"


class UnrecoverableStepError(NumericsError):
    """A bad gradient was met after some layer groups were updated, and nothing keeps what they were."""

    step: int = -1
    """Which one, counted from 0. Set by `run`, which counts."""


class BadSteps:
    """Ends a run after several bad steps in a row.

    Args:
        model: whose gradients name the module in which it begins, where they are there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.in_a_row = 0

    def watch(self, loss: float, norm: float, *, mended: bool = False) -> None:
        """Count a step that was not applied, before its gradients are gone; a step that is applied ends the row.

        Args:
            loss: of the step.
            norm: of its gradient.
            mended: a loss scale answers what is not finite.

        Raises:
            NumericsError: it is the third one in a row.
        """
        good = mended or (math.isfinite(norm) and math.isfinite(loss))
        self.in_a_row = 0 if good else self.in_a_row + 1
        if self.in_a_row >= MAX_BAD_STEPS:
            raise _not_finite_error(self._model, loss, norm, self.in_a_row)


def _not_finite_error(model: nn.Module, loss: float, norm: float, steps: int) -> NumericsError:
    """The error of a run whose gradient stays non-finite, naming where that shows first."""
    bad_weights = list(_not_finite((name, param) for name, param in model.named_parameters()))
    named = [(name, param.grad) for name, param in model.named_parameters() if param.grad is not None]
    bad = list(_not_finite(reversed(named)))  # the backward pass runs from the last module to the first
    got = [f"loss {loss:.6g}; {len(bad)} of {len(named)} gradients are not finite"]
    try_ = "optim.lr lower, optim.warmup_steps higher, or that module in FP32:\n"
    try_ += '[[precision.rules]] match = "NAME" compute = "fp32"'
    if not named:
        got = [f"loss {loss:.6g}, gradient norm {norm:.6g}"]
        try_ = 'optim.lr lower, optim.warmup_steps higher, or precision.mode = "fp32";\n'
        try_ += 'memory.executor = "standard" names the module in which it begins'
    if bad:
        got.append(f"first in backward order: {bad[0].rpartition('.')[0] or bad[0]} ({bad[0]})")
    if bad_weights:
        got.append(f"{len(bad_weights)} parameters are not finite themselves, the first is {bad_weights[0]}")
    return NumericsError(
        f"Non-finite gradient in {steps} steps in a row",
        got="\n".join(got),
        need="finite losses and gradients; the weights have not changed since the last good step",
        try_=try_,
    )


def all_finite(named: Iterable[tuple[str, Tensor]]) -> bool:
    """True where every floating-point tensor is finite. All are asked, as ranks that hold other ones have to meet."""
    return not list(_not_finite((name, t) for name, t in named if t.is_floating_point()))


@torch.no_grad()
def _not_finite(named: Iterator[tuple[str, Tensor | None]]) -> Iterator[str]:
    for name, tensor in named:
        if tensor is None:
            continue
        if not (values_finite([tensor]) if isinstance(tensor, DTensor) else torch.isfinite(tensor).all()):
            yield name  # on all ranks, of a tensor that is in parts
