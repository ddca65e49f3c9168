"""A pickle read as data: which names it would import and call, and with what. Nothing is imported, called or altered.

Loading a pickle runs it; a list of allowed classes is not enough, because a pickle can also set attributes of a class
that it may name. Here each global is a name and each object is the call that would have made it. Only the opcodes that
`pickle.dump` writes for plain objects are known, and none of them takes more memory than its bytes.
"""

import io
import pickletools
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any


class InertPickleError(ValueError):
    """The bytes are no pickle, or one with more in it than plain objects."""


@dataclass(frozen=True)
class Global:
    """What the pickle would import: `name` of `module`."""

    module: str
    name: str


@dataclass(eq=False)
class Call:
    """What the pickle would make by `function(*args)`, then change by `state`. Equal only to itself."""

    function: Global
    args: tuple[Any, ...]
    state: Any = None
    """What BUILD would give to `__setstate__` or put into `__dict__`; None where there was none."""


@dataclass
class _Stack:
    """The values of the pickle's stack machine; a mark holds the values below it."""

    values: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: list[Any] = field(default_factory=list)

    def pop_to_mark(self) -> list[Any]:
        values, self.values = self.values, self.below.pop()
        return values

    def pop(self, num: int) -> tuple[Any, ...]:
        if len(self.values) < num:
            raise InertPickleError("a value is missing on its stack")
        values = tuple(self.values[len(self.values) - num :])
        del self.values[len(self.values) - num :]
        return values


_IGNORED = {"PROTO", "FRAME"}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_inert_pickle(data: bytes, known: Container[Global]) -> Any:
    """The object that `data` describes: None, bool, int, str, tuple, list, dict, `Global` and `Call`.

    Args:
        data: the whole pickle.
        known: the globals that it may name.

    Raises:
        InertPickleError: for any bytes that are not such a pickle.

    Example:
        >>> import pickle
        >>> read_inert_pickle(pickle.dumps({"size": [1, 2], "of": complex}), {Global("builtins", "complex")})
        {'size': [1, 2], 'of': Global(module='builtins', name='complex')}
    """
    stack = _Stack()
    try:
        for code, argument in _opcodes(data):
            if code == "STOP":
                return stack.pop(1)[0]
            _step(stack, code, argument)
            if code == "STACK_GLOBAL" and (named := stack.values[-1]) not in known:
                raise InertPickleError(f"it names {named.module}.{named.name}"[:200])
    except (IndexError, TypeError, ValueError) as error:
        if isinstance(error, InertPickleError):
            raise
        raise InertPickleError(f"damaged ({error})") from error
    raise AssertionError("genops ends with STOP or raises ValueError")


def _opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    for code, argument, _ in pickletools.genops(io.BytesIO(data)):
        yield code.name, argument


def _step(stack: _Stack, code: str, argument: Any) -> None:
    """One opcode. Raises IndexError, TypeError or ValueError where the stack does not hold what it needs."""
    if code in _IGNORED:
        return
    if code in _ARGUMENTS:
        stack.values.append(argument)
    elif code in _CONSTANTS:
        stack.values.append(_CONSTANTS[code])
    elif code in _TUPLES:
        stack.values.append(stack.pop(_TUPLES[code]))
    elif code == "MARK":
        stack.below.append(stack.values)
        stack.values = []
    elif code == "TUPLE":
        items = stack.pop_to_mark()
        stack.values.append(tuple(items))
    elif code == "MEMOIZE":
        stack.memo.append(stack.values[-1])
    elif code in ("BINGET", "LONG_BINGET"):
        stack.values.append(stack.memo[argument])
    else:
        _change(stack, code)


def _change(stack: _Stack, code: str) -> None:
    """The opcodes that make containers and objects, or put something into the last one."""
    if code == "EMPTY_LIST":
        stack.values.append([])
    elif code == "EMPTY_DICT":
        stack.values.append({})
    elif code in ("APPEND", "APPENDS"):
        items = stack.pop_to_mark() if code == "APPENDS" else stack.pop(1)
        _last(stack, list).extend(items)
    elif code in ("SETITEM", "SETITEMS"):
        items = stack.pop_to_mark() if code == "SETITEMS" else stack.pop(2)
        _last(stack, dict).update(zip(map(_key, items[::2]), items[1::2], strict=True))
    elif code == "STACK_GLOBAL":
        module, name = stack.pop(2)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise InertPickleError("a global whose name is no text")
        stack.values.append(Global(module, name))
    elif code in ("REDUCE", "NEWOBJ"):
        function, args = stack.pop(2)
        if not (isinstance(function, Global) and isinstance(args, tuple)):
            raise InertPickleError("a call of something that is no global")
        stack.values.append(Call(function, args))
    elif code == "BUILD":
        (state,) = stack.pop(1)
        _last(stack, Call).state = state
    else:
        raise InertPickleError(f"opcode {code}, which a plain object does not need")


def _key(value: Any) -> Any:
    """Text or an object. The hash of nested tuples takes stack and time without bound."""
    if type(value) not in (str, Call):
        raise InertPickleError(f"a {type(value).__name__} as the key of a dict")
    return value


def _last(stack: _Stack, kind: type) -> Any:
    value = stack.values[-1]
    if type(value) is not kind:
        raise InertPickleError(f"a {type(value).__name__} where a {kind.__name__} must be")
    return value
