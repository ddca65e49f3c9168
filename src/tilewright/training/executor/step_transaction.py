"""The transaction of a step: it happens whole or not at all, also where an allocator finds no memory in its middle.

    transaction = StepTransaction(model, params, device, parts=(clip, scaler))
    with transaction.rollback_on_oom():  # inside the step: out of memory restores the state before it
        ...                                    # forward, backward
        transaction.retry_on_oom(update)  # a piece that changes weights is called again until it is through

    run_with_retries(step, reduce_memory)  # around the step: computed again after the plan was made smaller

Up to the update, what a step changes is little: generators, the state of clipping and loss scale, buffers, what modules
note. It is copied before the step and put back. The update itself cannot be undone without a copy of weights and
states, so it is made of pieces that can be called again, and is brought to its end. Only where that fails is a step
half done: `PartialUpdateError`, and the run stops.

The executors use `StepTransaction`, the training loop `run_with_retries`; which plan is tighter, `replan` knows.

`BadSteps` counts steps whose numbers are bad: how many in a row end a run, and the errors that say so.
"""

import gc
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilewright.core.errors import FitError, NumericsError
from tilewright.memory.tracking.byte_tables import is_out_of_memory
from tilewright.memory.tracking.malloc import trim_malloc
from tilewright.optim.gradients import all_finite as values_finite
from tilewright.parallel.agree import OnAllRanksError
from tilewright.precision.snapshot import ModuleSlots, Snapshot

Result = TypeVar("Result")
TRIES = 3
"""Calls of a piece that finds no memory, what is free made free before each."""


class PartialUpdateError(FitError):
    """Memory ran out where the step can be neither finished nor taken back: in the middle of an update, or on one of
    several ranks. The weights are of no use."""


class Stateful(Protocol):
    """A component with a small state of JSON types that a step changes: scaler, clipping, data stream, progress."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StateBefore:
    """State that a step changes before its update, as it was.

    Args:
        slots: of the model.
        device: whose generator the model draws from, in addition to those of the host.
        parts: what else has a state.
    """

    def __init__(self, slots: ModuleSlots, device: torch.device, parts: Sequence[Stateful]):
        self._parts = [(part, part.state_dict()) for part in parts]
        self._snapshot = Snapshot(slots, device)

    def forget_pass(self, *parts: Stateful) -> None:
        """Forget the pass of a step that is skipped, in its transaction: what forward and backward left in the model is
        as it was, and in these parts.

        Generators stay where they are, as data does: the next step draws other numbers.
        """
        self._snapshot.notes.restore()
        for part, state in self._parts:
            if part in parts:
                part.load_state_dict(state)

    def restore(self) -> None:
        """Restore the state before a step's transaction, for a step that is computed again."""
        self._snapshot.restore()
        for part, state in self._parts:
            part.load_state_dict(state)


class StepTransaction:
    """State that the steps of one executor share.

    Args:
        model: its buffers and notes are put back.
        params: their gradients are freed; a step begins without any.
        device: whose generator the model draws from, in addition to those of the host.
        parts: what else has a state that a step changes before the update.
    """

    def __init__(
        self, model: nn.Module, params: Sequence[Tensor], device: torch.device, parts: Sequence[Stateful] = ()
    ) -> None:
        self._model = model
        self._slots: ModuleSlots | None = None
        self._params = params
        self._device = device
        self._parts = parts
        self.oom_messages: list[str] = []
        """Errors of the allocator where a piece was called again, since the caller last emptied this list."""

    @contextmanager
    def rollback_on_oom(
        self, *, irrevocable: Callable[[BaseException], PartialUpdateError | None] = lambda _: None
    ) -> Iterator[StateBefore]:
        """Roll back all that was changed inside if an allocator finds no memory, and raise its error.

        Gives what was before, for a step that turns out to be skipped.

        Args:
            irrevocable: the error instead where it cannot be put back, asked then; None where it can. It may do its
                own part of it.

        Raises:
            PartialUpdateError: it cannot be put back.
        """
        if self._slots is None:
            self._slots = ModuleSlots(self._model)
        before = StateBefore(self._slots, self._device, self._parts)
        try:
            yield before
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._free_after_error(error)
            final = irrevocable(error)
            if final is not None:
                raise final from error
            for param in self._params:
                param.grad = None
            before.restore()
            raise

    def retry_on_oom(self, work: Callable[[], Result], on_oom: Callable[[], None] | None = None) -> Result:
        """Call `work()` of a step's transaction again, each time that an allocator finds no memory, until it is
        through.

        Args:
            work: continues where it stood when it is called again, or starts over.
            on_oom: frees what can be computed again; called before `work` is called again.

        Raises:
            torch.OutOfMemoryError, RuntimeError, MemoryError: the allocator's error of the last try.
        """
        for left in reversed(range(TRIES)):
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not left:
                    raise
                self.oom_messages.append(first_line(error))
                self._free_after_error(error)
            if on_oom is not None:
                on_oom()
            free_memory(self._device)
        raise AssertionError("the last try returns or raises")

    def free_memory(self) -> None:
        """Free all that nothing reads any more in a step's transaction."""
        free_memory(self._device)

    def _free_after_error(self, error: BaseException) -> None:
        """Free the memory that the error of a step holds: its frames keep what was computed up to it."""
        traceback.clear_frames(error.__traceback__)
        free_memory(self._device)


def run_with_retries(work: Callable[[], Result], tighten: Callable[[str], bool], *, alone: bool = True) -> Result:
    """Run a step's transaction with retries: work() is called again where an allocator finds no memory, each time after
    `tighten`.

    Args:
        work: changes nothing where it does not come to its end, as a step in its transaction.
        tighten: makes `work` take less memory, given what the allocator said. False where it cannot: then `work` is
            called once more, because what the failure has freed may be enough.
        alone: False on one of several ranks, which repeat nothing unless all have stopped.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: the allocator's error of the last call. Nothing has changed.
        PartialUpdateError: of one of several ranks, where the others have not stopped.
    """
    tighter = True
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not tighter or not is_out_of_memory(error):
                raise
            if not alone and not isinstance(error, OnAllRanksError):
                raise others_wait(error) from error
            traceback.clear_frames(error.__traceback__)  # they hold what was computed up to it
            said = first_line(error)
        tighter = tighten(said)


def free_memory(device: torch.device) -> None:
    """Free memory for a step: garbage, and the free blocks of the allocators."""
    gc.collect()
    trim_malloc()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """The text of a step's error, in one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def partial_update(error: BaseException, why: str) -> PartialUpdateError:
    """The error of a step's transaction that can be neither finished nor taken back."""
    return PartialUpdateError(
        "Out of memory during the optimizer update; the retry failed",
        got=f"{first_line(error)}; {why}",
        need="memory for the rest of the update: the weights in memory are half new, so nothing of them is saved",
        try_="the same command continues from the newest checkpoint; give it more memory, or\n"
        'memory.rollback = "buffer" with optim.clip = "delayed" (layer_major), which can take such a step back',
    )


def others_wait(error: BaseException) -> PartialUpdateError:
    """The error of a step on one of several ranks that found no memory where the others are further, or wait for it."""
    return PartialUpdateError(
        "Out of memory on one rank, in the middle of a step of all",
        got=f"{first_line(error)}; the other ranks are past this point or wait for it",
        need="memory for the step on every rank: none can repeat its part alone, so all end",
        try_="the same command continues from the newest checkpoint; for less memory per rank:\n"
        "--train.micro_batch_size 1, --train.activation_checkpoint full, or more processes",
    )


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
        """Count a bad step, one that was not applied, before its gradients are gone; a step that is applied ends the
        row.

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
    """The error of a run of bad steps, whose gradient stays non-finite, naming where that shows first."""
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
    """True where every floating-point tensor of a step is finite. All are asked, as ranks that hold other ones have to
    meet."""
    return not list(_not_finite((name, t) for name, t in named if t.is_floating_point()))


@torch.no_grad()
def _not_finite(named: Iterator[tuple[str, Tensor | None]]) -> Iterator[str]:
    for name, tensor in named:
        if tensor is None:
            continue
        if not (values_finite([tensor]) if isinstance(tensor, DTensor) else torch.isfinite(tensor).all()):
            yield name  # on all ranks, of a tensor that is in parts
