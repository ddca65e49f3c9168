"""Rows of a run folder with only what the report can use: numbers that are numbers, tables of numbers by name.

Training writes null for a number that is not finite. Other programs write NaN, Infinity, or text; all of these become
None here, once, so that no rule and no chart meets them.
"""

from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]

LARGEST, SMALLEST = 1e300, 1e-300
"""A number beyond the first counts as infinite, one within the second as zero: sums, differences and ratios of what
stays are doubles."""


def number(value: object) -> float | None:
    """A clean value of a run folder's row as a float; None where it is no number, is not finite, or is beyond
    `LARGEST`.

    Example:
        >>> number(3), number(float("nan")), number("3"), number(True), number(10**400)
        (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -LARGEST <= value <= LARGEST:  # NaN is neither
        return None
    return float(value) if abs(value) >= SMALLEST else 0.0


def clean(value: Any) -> Any:
    """A clean JSON value in which every number that `number` refuses is None; integers stay integers."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None if number(value) is None else value
    return value


def numbers(value: object) -> dict[str, float]:
    """The entries of a mapping that are numbers; empty if it is no mapping."""
    if not isinstance(value, Mapping):
        return {}
    return {name: item for name, item in value.items() if number(item) is not None}


def number_tables(value: object) -> dict[str, dict[str, float]]:
    """The entries of a mapping that are mappings of numbers."""
    if not isinstance(value, Mapping):
        return {}
    return {name: numbers(item) for name, item in value.items() if isinstance(item, Mapping)}


def step_row(row: Row) -> Row:
    """A clean row of training with its tables of bytes; a table that is none is left out."""
    found = {name: value for name, value in row.items() if not name.startswith("memory_") and name != "memory"}
    if number(row.get("memory_bytes")) is not None:
        found["memory_bytes"] = row["memory_bytes"]
    if isinstance(row.get("memory"), Mapping):
        found["memory"] = numbers(row["memory"])
    for name in ("memory_phases", "memory_tiers"):
        if isinstance(row.get(name), Mapping):
            found[name] = number_tables(row[name])
    return found


def eval_row(row: Row) -> Row:
    """Clean a row of evaluation: by domain its loss (None where not finite), the number of tokens, at least 1, and the
    bytes of their text (None where they are not text).

    `eval` is of the same rows at each step, so that a curve of it means something; `eval_all` of all that was evaluated
    at this step; `eval_other` of text that is not trained on."""
    tables = {name: _eval_table(row.get(name)) for name in ("eval", "eval_part", "eval_other")}
    of_all, part = tables.pop("eval"), tables.pop("eval_part")
    return {
        "step": row["step"],
        "time_s": number(row.get("time_s")),
        "eval": part or of_all,
        "eval_all": of_all,
        **tables,
    }


def _eval_table(value: object) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for domain, result in value.items() if isinstance(value, Mapping) else ():
        if isinstance(result, Mapping):
            loss, tokens = number(result.get("loss")), number(result.get("tokens"))
            if tokens is not None and tokens >= 1:
                size = number(result.get("bytes"))
                found[str(domain)] = {"loss": loss, "tokens": tokens, "bytes": size if size and size >= 1 else None}
    return found


def plan_of(value: Row | None) -> Row | None:
    """A run folder's plan, cleaned, with its phases as tables of numbers."""
    return None if value is None else value | {"phases": number_tables(value.get("phases"))}
