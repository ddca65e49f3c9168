"""JSON of many doubles in few bytes: six figures each, null for what is not finite."""

import json
import math
from collections.abc import Mapping
from typing import Any


def compact_json(value: Any) -> str:
    """JSON text without blanks; floats with six figures (integers up to 2**53 with all of theirs).

    Raises:
        TypeError: JSON does not have such an object.

    Example:
        >>> compact_json({"y": [1.0, 0.1234567, float("nan")], "name": "a"})
        '{"y":[1,0.123457,null],"name":"a"}'
    """
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(str(key))}:{compact_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join([_float(item) if type(item) is float else compact_json(item) for item in value]) + "]"
    return json.dumps(value)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return "null"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.6g}"
