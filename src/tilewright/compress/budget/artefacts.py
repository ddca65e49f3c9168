"""Artefacts of a compression beside its budget: which are inside, and which could be after training for integers."""

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.compress.budget.record import Record
from tilewright.compress.budget.rises import in_words, rounded, ruling
from tilewright.compress.export.target import Target


def judged(row: Mapping[str, Any], made: Mapping[str, Any], budget: float, *, points: bool = False) -> Record:
    """True if an artefact is inside the budget: the rise of its run, and what its rounding adds.

    Args:
        row: of `export_run`.
        made: the run that it is of, with its rises.
        budget: of the loss.
        points: of what is wrong (`measure`), as the labels that are the likeliest say.

    Example:
        >>> row = {"state": "ran", "loss": {"text": {"fp32": 2.0, "consumer": 2.1}}}
        >>> judged(row, {"rise": 0.0}, 0.1)["inside"], judged(row, {"rise": 0.08}, 0.1)["inside"]
        (True, False)
    """
    losses = row.get("right" if points else "loss")
    if row["state"] != "ran" or not losses:
        reason = row.get("reason") or f"state {row['state']}"
        return {"rise": None, "equal_rise": None, "inside": False, "reason": reason}
    ours, theirs = (sum(one[key] for one in losses.values()) for key in ("fp32", "consumer"))
    if points:  # of what is right
        ours, theirs = len(losses) - ours, len(losses) - theirs
    both = rounded(made, ours / len(losses), theirs / len(losses), points=points)
    return both | {"inside": ruling(both) <= budget, "reason": row.get("reason") or in_words(both)}


def missed(rows: Sequence[Mapping[str, Any]], targets: Sequence[Target]) -> dict[str, list[Target]]:
    """The targets that ran outside the budget and that take codes trained in a format of integers, by format.

    Args:
        rows: judged.
        targets: that were asked for.
    """
    outside = {row["target"] for row in rows if row["rise"] is not None and not row["inside"]}
    found: dict[str, list[Target]] = {}
    for target in targets:
        if target.takes and target.name in outside:
            found.setdefault(target.takes, []).append(target)
    return found
