"""Evaluation mode, and eager mode, for the length of a block; what was before afterwards.

The mode of a module and torch's stance on compilation belong to the process: blocks in several threads are inside of
one mode, which ends with the last of them. If each put back what it had found, two that overlap would leave what the
second one found: a model that trains without dropout from then on, or compiled code that stays eager.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class _Held:
    """A part's own mode, while blocks keep it in evaluation mode."""

    training: bool
    blocks: int = 0


@dataclass
class _Blocks:
    """All blocks of the process that are open now."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    parts: "weakref.WeakKeyDictionary[nn.Module, _Held]" = field(default_factory=weakref.WeakKeyDictionary)
    eager: int = 0
    stance: Any = None
    """A `torch.compiler.set_stance`, which is a function to type checkers and a class to Python."""


_OPEN = _Blocks()


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside the context: no part drops values or updates running statistics. Threads
    may be inside at the same time.

    Example:
        >>> net = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)); net[0] = net[0].eval()
        >>> with evaluation(net): net.training
        False
        >>> net.training, net[0].training, net[1].training
        (True, False, True)
    """
    parts = list(module.modules())
    with _OPEN.lock:
        for part in parts:
            _OPEN.parts.setdefault(part, _Held(part.training)).blocks += 1
        module.eval()
    try:
        yield
    finally:
        with _OPEN.lock:
            for part in parts:
                held = _OPEN.parts[part]
                held.blocks -= 1
                if not held.blocks:
                    part.training = _OPEN.parts.pop(part).training


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled code eagerly inside the context, and compile nothing: "force_eager" of torch's stances, for all
    threads until the last one has left."""
    with _OPEN.lock:
        if not _OPEN.eager:
            _OPEN.stance = torch.compiler.set_stance("force_eager")
        _OPEN.eager += 1
    try:
        yield
    finally:
        with _OPEN.lock:
            _OPEN.eager -= 1
            if _OPEN.stance is not None and not _OPEN.eager:
                _OPEN.stance.__exit__(None, None, None)
                _OPEN.stance = None
