"""Which rise of the loss the budget is of: over the run, and over the run with as many more steps.

Rises are relative, or percentage points of images that are wrong (`held_out_rise`). Of a run that was still learning
any cut looks free beside what it was, for recovery trains it further. Of one that further steps make worse, a cut looks
free beside those. So the larger of both rises rules; without the control that of the run alone.
"""

import math
from collections.abc import Mapping
from typing import Any

from tilewright.compress.budget.held_out_rise import RowLosses


def rises_of(losses: RowLosses, whole: RowLosses, equal: RowLosses | None) -> dict[str, float | None]:
    """Rise and standard error of a model's held-out losses over the run, and over the run with as many more steps
    (None: not run).

    Args:
        losses: of a model.
        whole: of the run.
        equal: of the run with as many more steps, on the same rows.
    """
    rise, error = losses.rise_over(whole)
    equal_rise, equal_error = (None, None) if equal is None else losses.rise_over(equal)
    return {"rise": rise, "error": error, "equal_rise": equal_rise, "equal_error": equal_error}


def ruling(row: Mapping[str, Any]) -> float:
    """The rise of the loss that is compared with the budget.

    Example:
        >>> ruling({"rise": -0.02, "equal_rise": 0.005}), ruling({"rise": 0.01, "equal_rise": None})
        (0.005, 0.01)
    """
    rise, equal = row["rise"], row.get("equal_rise")
    return rise if equal is None else max(rise, equal)


def rounded(row: Mapping[str, Any], ours: float, theirs: float, *, points: bool = False) -> dict[str, float | None]:
    """Both rises of an artefact for the budget, from those of its model and its own rounding.

    Args:
        row: of the model that it was made of.
        ours: loss of that model.
        theirs: loss of the artefact, on the same rows.
        points: rises are differences (`held_out_rise`).

    Example:
        >>> rounded({"rise": 0.0, "equal_rise": None}, 2.0, 2.5)
        {'rise': 0.25, 'equal_rise': None}
        >>> rounded({"rise": 0.25, "equal_rise": None}, 0.25, 0.5, points=True)
        {'rise': 0.5, 'equal_rise': None}
    """
    found = {name: row.get(name) for name in ("rise", "equal_rise")}
    more = theirs - ours if points else theirs / ours
    return {
        name: None if rise is None else rise + more if points else (1 + rise) * more - 1 for name, rise in found.items()
    }


NEAR = 0.15
"""Share of the measured time by which the predicted one may be away."""


def near_in_time(predicted: float, measured: float) -> bool:
    """True if a predicted time is near the measured one, beside the rises.

    Example:
        >>> near_in_time(0.9, 1.0), near_in_time(0.8, 1.0)
        (True, False)
    """
    return abs(predicted / measured - 1) <= NEAR


def error_in_words(error: float | None) -> str:
    """The standard error of a rise in percent. One held-out row tells none: infinite, and null in a record.

    Example:
        >>> error_in_words(0.0123), error_in_words(math.inf), error_in_words(None)
        ('1.23', 'unknown', 'unknown')
    """
    return "unknown" if error is None or not math.isfinite(error) else f"{100 * error:.2f}"


def in_words(row: Mapping[str, Any]) -> str:
    """The rises of the loss for the budget over the run, and over the run with as many more steps, in words.

    Example:
        >>> in_words({"rise": -0.02, "equal_rise": 0.005})
        '-2.00 % over the run, +0.50 % over the run with as many more steps'
        >>> in_words({"rise": 0.01, "equal_rise": None})
        '+1.00 % over the run'
    """
    equal = row.get("equal_rise")
    more = "" if equal is None else f", {100 * equal:+.2f} % over the run with as many more steps"
    return f"{100 * row['rise']:+.2f} % over the run{more}"
