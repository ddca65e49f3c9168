"""Signals that stop a run in good order, and what has changed in the recipe when it starts again.

SIGTERM and Ctrl-C finish the step, save, and end with exit code 0; a second Ctrl-C breaks off at once. So does the
first one where it ended a compiler that the step needs.
The checkpoint itself is found by `checkpoint_store` and read by `checkpoint_state`.
"""

import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tilewright.core.config import setting_names
from tilewright.core.log import say


class StopRequest:
    """Turns SIGTERM and the first SIGINT into a flag that the loop looks at between steps.

    A context manager: the handlers that were there come back at the end. Outside the main thread Python
    allows no handlers, so there the flag only follows `request`.

    Example:
        >>> with StopRequest() as stop:
        ...     stop.request("the tutorial is over")
        ...     stop.reason
        'the tutorial is over'
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[int, Any] = {}

    def request(self, reason: str) -> None:
        """Request a stop after the current step, as a signal does."""
        self.reason = self.reason or reason

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.reason is not None and error is not None and _is_of_compiler(error):
            say(
                f"{self.reason} ended the C++ compiler too, so this step cannot be finished. The same command "
                "continues from the newest checkpoint, or starts again where there is none.",
                error=True,
            )
            raise KeyboardInterrupt from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        self.request(name)
        say(f"{name}: finishing the step and saving; Ctrl-C again breaks off at once.", error=True)


def _is_of_compiler(error: BaseException) -> bool:
    """True of an error of torch's compiler. A terminal sends Ctrl-C to all processes of a command, and `timeout` its
    signal: compilers that run at the time end with it."""
    if not isinstance(error, RuntimeError) or "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.exc import BackendCompilerFailed

    return isinstance(error, BackendCompilerFailed)


@dataclass(frozen=True)
class SettingChange:
    """A field whose value differs between the run folder's recipe and the present one."""

    field: str
    before: Any
    now: Any
    numerics: bool
    """True where it changes the numbers that a step computes."""

    def __str__(self) -> str:
        return f"{self.field}: {self.before!r} -> {self.now!r}" + (" (changes the numbers)" if self.numerics else "")


def recipe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """List settings that differ between two recipes of a stopped run, each as {section.field: value}.

    Example:
        >>> [str(c) for c in recipe_changes({"optim.lr": 0.1}, {"optim.lr": 0.2})]
        ['optim.lr: 0.1 -> 0.2 (changes the numbers)']
    """
    changes = []
    for name, value in now.items():
        if before.get(name) != value:
            changes.append(SettingChange(name, before.get(name), value, setting_names.changes_numbers(name)))
    return changes
