"""Artefacts of a compression beside its budget: which are inside, and which could be after training for integers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.compress.budget.budget_rise import in_words, rounded, ruling
from tilewright.compress.budget.compress_record import Record
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.target import Target, missing
from tilewright.compress.export.targets import why_not
from tilewright.compress.exports_file import change_since
from tilewright.core.errors import ConfigError


def unproven(targets: Sequence[Target], source: ExportSource) -> dict[str, str]:
    """Reasons by target why no artefact of a compression can be inside a budget here, whatever is cut: it cannot be
    written, or its runtime is not there.

    Args:
        targets: that were asked for.
        source: the run or model.

    Raises:
        ConfigError: none of the targets is left.
    """
    found = {target.name: reason for target in targets if (reason := _why_unproven(target, source)) is not None}
    if len(found) < len(targets):
        return found
    raise ConfigError(
        "None of the targets can be proven",
        got="; ".join(f"{name}: {reason}" for name, reason in found.items()),
        need="at least one that can be written of this model and run here: the budget is over what it answers",
        try_="--targets hf, or another one",
        where="--targets",
    )


def _why_unproven(target: Target, source: ExportSource) -> str | None:
    return why_not(target, source) or missing(target.consumer.packages, target.consumer.extra)


def still_stand(rows: Sequence[Mapping[str, Any]], targets: Sequence[Target], source: ExportSource, run: Path) -> bool:
    """True if artefacts still stand: a new export would say what the rows of an earlier one say: nothing failed then,
    which may have been a full disk or a limit of time, nothing has changed since, and what was not there is not there
    now.

    Args:
        rows: of artefacts of a run; without any it is False.
        targets: that were asked for.
        source: the run or model that was compressed.
        run: the run that they are of.
    """
    absent = {target.name for target in targets if _why_unproven(target, source) is not None}
    return bool(rows) and all(
        row["state"] != "failed"
        and change_since(row, run) is None
        and (row["state"] != "unavailable" or row["target"] in absent)
        for row in rows
    )


def judged(
    row: Mapping[str, Any],
    made: Mapping[str, Any],
    budget: float,
    counts: Mapping[str, float],
    *,
    points: bool = False,
) -> Record:
    """True if an artefact is inside the budget: the rise of its run, and what its rounding adds.

    Args:
        row: of `export_run`.
        made: the run that it is of, with its rises.
        budget: of the loss.
        counts: held-out targets by domain. An export asks for as many of each domain, rises are over all of them.
        points: of what is wrong (`held_out_rise`), as the labels that are the likeliest say.

    Example:
        >>> row = {"state": "ran", "loss": {"text": {"fp32": 2.0, "consumer": 2.1}}}
        >>> [judged(row, {"rise": rise}, 0.1, {"text": 100})["inside"] for rise in (0.0, 0.08)]
        [True, False]
    """
    losses = row.get("right" if points else "loss")
    if row["state"] != "ran" or not losses:
        reason = row.get("reason") or f"state {row['state']}"
        return {"rise": None, "equal_rise": None, "inside": False, "reason": reason}
    whole = sum(counts[name] for name in losses)
    ours, theirs = (
        sum(counts[name] * one[key] for name, one in losses.items()) / whole for key in ("fp32", "consumer")
    )
    if points:  # of what is right
        ours, theirs = 1 - ours, 1 - theirs
    both = rounded(made, ours, theirs, points=points)
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
