"""A step happens whole or not at all, also where an allocator finds no memory in the middle of it.

    whole = WholeStep(model, params, device, parts=(clip, scaler))
    with whole.attempt():          # forward, backward: out of memory takes all of it back, and the error goes on
        ...
    whole.finish(update)           # what has begun to change weights goes on where it stood

Up to the update, what a step changes is little: generators, the state of clipping and loss scale, buffers, what modules
note. It is kept before the step and put back. The update itself cannot be taken back without a copy of weights and
states, so it is made of pieces that can be called again, and is brought to its end. Only where that fails is a step
half done: `HalfUpdated`, and the run stops.

Used by the executors. What happens then, a retry under a tighter plan, is the matter of `regroup`.
"""

import gc
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.core.errors import FitError
from tilewright.memory.probe import give_back_free_pages
from tilewright.memory.table import is_out_of_memory
from tilewright.precision.fp8_linear import Fp8Linear
from tilewright.precision.own_weights import counters
from tilewright.precision.tile_linear import TileLinear

Result = TypeVar("Result")
_TORCHS = ("_is_full_backward_hook", "_compiled_call_impl")
"""Attributes of every module that no pass changes."""
TRIES = 3
"""Calls of a piece that finds no memory, what is free made free before each."""


class HalfUpdated(FitError):
    """Memory ran out in the middle of an update, and freeing some did not help. The weights are of no use."""


class Stateful(Protocol):
    """Small state that a step changes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class WholeStep:
    """What the steps of one executor share.

    Args:
        model: its buffers and notes are put back.
        params: their gradients are let go of; a step begins without any.
        device: whose generator the model draws from, besides those of the host.
        parts: what else has a state that a step changes before the update.
    """

    def __init__(
        self, model: nn.Module, params: Sequence[Tensor], device: torch.device, parts: Sequence[Stateful] = ()
    ) -> None:
        self._model = model
        self._modules: _Modules | None = None
        self._params = params
        self._device = device
        self._parts = parts
        self.relief: Callable[[], None] = lambda: None
        """Lets go of what can be computed again; called before a piece is called again."""
        self.relieved: list[str] = []
        """What the allocator said where a piece was called again, since somebody emptied this list."""

    @contextmanager
    def attempt(self, *, irrevocable: Callable[[], str | None] = lambda: None) -> Iterator[None]:
        """Where an allocator finds no memory inside, everything is put back, and its error goes on.

        Args:
            irrevocable: why it cannot be put back, asked then; None where it can. It may do its own part of it.

        Raises:
            HalfUpdated: it cannot be put back.
        """
        self._modules = self._modules or _Modules(self._model)
        before = _Before(self._modules, self._device, self._parts)
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._let_go(error)
            why = irrevocable()
            if why is not None:
                raise half_updated(error, why) from error
            for param in self._params:
                param.grad = None
            before.restore()
            raise

    def finish(self, work: Callable[[], Result]) -> Result:
        """work(); called again where an allocator finds no memory, until it is through.

        Args:
            work: goes on where it stood when it is called again, or starts over.

        Raises:
            torch.OutOfMemoryError, RuntimeError, MemoryError: the allocator's error of the last try.
        """
        for left in reversed(range(TRIES)):
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not left:
                    raise
                self.relieved.append(first_line(error))
                self._let_go(error)
            self.relief()
            free_memory(self._device)
        raise AssertionError("the last try returns or raises")

    def free_memory(self) -> None:
        """Let go of all that nothing reads any more."""
        free_memory(self._device)

    def _let_go(self, error: BaseException) -> None:
        """The error's frames hold what was computed up to it."""
        traceback.clear_frames(error.__traceback__)
        free_memory(self._device)


class _Modules:
    """Where a model's modules hold what a pass changes besides gradients; they are looked through once.

    Linear layers with 8-bit weights hold codes, which a pass does not change, and counts of what was executed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.buffers: list[Tensor] = []
        self.attributes: list[tuple[dict[str, Any], str]] = []
        self.counted: list[nn.Module] = []
        self.counters = counters(model)
        for module in model.modules():
            if isinstance(module, TileLinear | Fp8Linear):
                self.counted.append(module)
                continue
            self.buffers += [buffer for buffer in module.buffers(recurse=False) if buffer is not None]
            held = vars(module)
            names = [name for name, value in held.items() if value is None or isinstance(value, Tensor)]
            self.attributes += [(held, name) for name in names if name not in _TORCHS]


class _Before:
    """What a step changes before its update, as it was."""

    def __init__(self, modules: _Modules, device: torch.device, parts: Sequence[Stateful]) -> None:
        self._device = device
        self._parts = [(part, part.state_dict()) for part in parts]
        self._buffers = [(buffer, buffer.clone()) for buffer in modules.buffers]
        self._attributes = [(held, name, held.get(name)) for held, name in modules.attributes]
        counts = (*(vars(module).get("counts") for module in modules.counted), *modules.counters)
        self._counts = [(count, count.clone()) for count in counts if count is not None]
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        for part, state in self._parts:
            part.load_state_dict(state)
        for tensor, value in (*self._buffers, *self._counts):
            tensor.copy_(value)
        for held, name, value in self._attributes:
            held[name] = value
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def free_memory(device: torch.device) -> None:
    """Let go of what nothing reads any more, and of the allocators' free blocks."""
    gc.collect()
    give_back_free_pages()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def half_updated(error: BaseException, why: str) -> HalfUpdated:
    """The error of a step that can be neither finished nor taken back."""
    return HalfUpdated(
        "Memory ran out in the middle of an update, and making some free did not help.",
        got=f"{first_line(error)}; {why}",
        need="memory for the rest of the update: the weights in memory are half new, so nothing of them is saved",
        try_="the same command goes on from the newest checkpoint; give it more memory, or\n"
        'memory.undo = "journal" with optim.clip = "lagged" (layer_major), which can take such a step back',
    )
