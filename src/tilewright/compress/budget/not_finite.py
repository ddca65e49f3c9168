"""Numbers of a stage that are not finite: the stage is named, and what can be done without it goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from tilewright.compress.budget.compress_record import Record
from tilewright.compress.budget.held_out_rise import Say
from tilewright.core.errors import NumericsError

T = TypeVar("T")


@contextmanager
def stage_named(name: str) -> Iterator[None]:
    """Inside, an error for numbers that are not finite (`NumericsError`) says in which stage it was raised.

    Args:
        name: of the stage, in words.

    Example:
        >>> with stage_named("ffn-32, before recovery"):
        ...     raise NumericsError("Held-out loss is not finite")
        Traceback (most recent call last):
        tilewright.core.errors.NumericsError: Held-out loss is not finite
          where  ffn-32, before recovery
    """
    try:
        yield
    except NumericsError as error:
        problems = [
            replace(one, where=f"{name}: {one.where}" if one.where else name) for one in error.problems
        ]  # fmt: skip
        raise NumericsError.from_problems(problems) from error


def unless_not_finite(record: Record, name: str, say: Say, make: Callable[[], T]) -> T | None:
    """The result of a stage; None where its numbers are not finite now, or were not before.

    Args:
        record: gets the reason in "left_out", by name.
        name: of what is left out then.
        say: told so.
        make: raises a NumericsError where they are not.

    Example:
        >>> def diverge() -> float:
        ...     raise NumericsError("Held-out loss is not finite", where="ffn-32, after recovery")
        >>> record: Record = {}
        >>> unless_not_finite(record, "ffn-32", print, diverge)
        ffn-32 is left out: Held-out loss is not finite (ffn-32, after recovery)
        >>> unless_not_finite(record, "ffn-32", print, diverge)
        >>> list(record["left_out"])
        ['ffn-32']
    """
    if name in record.get("left_out", {}):
        return None
    try:
        return make()
    except NumericsError as error:
        reason = "; ".join(f"{one.what} ({one.where})" if one.where else one.what for one in error.problems)
        record.setdefault("left_out", {})[name] = reason
        say(f"{name} is left out: {reason}")
        return None
