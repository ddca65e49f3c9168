"""JSON that every reader can read: numbers that are not finite, which JSON does not have, become null.

`json.dumps` writes them as `NaN` and `Infinity`, upon which strict readers refuse the whole file.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Replace numbers that no double holds (NaN, infinite, or an integer too large) by None, for JSON.

    Mappings and sequences are copied as dicts and lists; everything else comes back as it is.

    Example:
        >>> finite({"loss": float("nan"), "norms": (1.0, float("inf")), "step": 3})
        {'loss': None, 'norms': [1.0, None], 'step': 3}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if abs(value) <= sys.float_info.max else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def to_json(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """JSON text of a value, with null for numbers that are not finite.

    Args:
        value: made of mappings, sequences, text, numbers, and what `default` turns into these.
        indent: as in `json.dumps`.
        default: of an object that JSON does not have, something that it has.

    Raises:
        TypeError: JSON does not have such an object, and there is no `default`.
    """
    plain = None if default is None else lambda item: finite(default(item))
    return json.dumps(finite(value), indent=indent, allow_nan=False, default=plain)


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text of unknown origin. Half a surrogate pair, which UTF-8 cannot write, becomes "?".

    Raises:
        ValueError: it is no JSON, no UTF-8, or nested deeper than Python follows.

    Example:
        >>> from_json('["\\\\ud83d", 1]')
        ['?', 1]
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    halves = "\\ud" if isinstance(text, str) else b"\\ud"
    return _writable(value) if halves in text.lower() else value  # type: ignore[operator]


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode("utf-8")
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value
