"""The cost of each cut before recovery, alone: loss, its error, parameters, seconds here. One kind at a time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from tilewright.compress.budget.budget_rise import error_in_words
from tilewright.compress.budget.compress_record import Record
from tilewright.compress.budget.held_out_rise import Batches, RowLosses, Say, parameters, row_losses_of, seconds_beside
from tilewright.compress.budget.not_finite import stage_named, unless_not_finite
from tilewright.compress.prune.cut_model import LayoutError
from tilewright.compress.prune.prune import MULTIPLE, Pruned, left, prune
from tilewright.compress.prune.tensors_of_units import find_units
from tilewright.compress.prune.unit_kinds import Kind
from tilewright.compress.prune.unit_scores import Method
from tilewright.core.errors import ConfigError

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)
"""Of units that go. What rounds to a number that was there is left out."""


@dataclass(frozen=True)
class CutCost:
    """The cost of one kind cut to one number, everything else whole.

    Args:
        kind: of unit.
        share: that was asked to go.
        units: that stay.
        before: units of the whole model.
        rise, error: of the held-out loss over the whole model (`held_out_rise`); its standard error.
        saved: parameters that go.
        speed: seconds of a forward pass of a few tokens or images, as a share of the whole model's.
        domains: rise by domain.
    """

    kind: Kind
    share: float
    units: int
    before: int
    rise: float
    error: float
    saved: int
    speed: float
    domains: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The cost of a cut before recovery, as plain types."""
        return asdict(self)

    @classmethod
    def of_json(cls, row: Mapping[str, Any]) -> "CutCost":
        """The cost of a cut before recovery from a record, which has null for an error that a single held-out row does
        not tell.

        Example:
            >>> cost = CutCost("ffn", 0.5, 32, 64, 0.01, math.inf, 10, 0.9)
            >>> CutCost.of_json(cost.to_json() | {"error": None}) == cost
            True
        """
        known: dict[str, Any] = {**row, "error": math.inf if row["error"] is None else row["error"]}
        return cls(**known)


def sensitivities(
    model: Any,
    whole: RowLosses,
    held_out: Batches,
    kinds: Sequence[Kind],
    importance: Method,
    batches: Sequence[Mapping[str, Tensor]],
    say: Say,
    record: Record,
    *,
    refit: bool,
) -> list[CutCost]:
    """Measure sensitivities: the costs of the cuts, each kind cut to each number.

    Args:
        model: that is cut, left as it was.
        whole: its own losses.
        held_out: rows by domain.
        kinds: that may be cut; those that this model cannot be cut in are left out, and said.
        importance: which units stay.
        batches: training text, for importance and fits.
        say: told what was measured, a line each.
        record: gets the reasons of cuts that are left out, whose numbers are not finite.
        refit: fit the layers behind each cut.

    Raises:
        ConfigError: none of the kinds can be cut.
    """
    units, reasons = find_units(model)
    for kind in kinds:
        if kind not in units:
            say(f"{kind} stay whole: {reasons.get(kind, 'the model has none')}")
    found: list[CutCost] = []
    there: list[Kind] = [kind for kind in kinds if kind in units]
    for kind in there:
        # The numbers of units that the shares leave, the largest first; a number that cuts nothing is none.
        widths = {left(units[kind][0], share, MULTIPLE.get(kind, 1)): share for share in reversed(SHARES)}
        whole_width = units[kind][0].count.units
        widths.pop(whole_width, None)
        if not widths:
            reasons[kind] = f"{whole_width} of them, which go in multiples of {MULTIPLE.get(kind, 1)}"
            say(f"{kind} stay whole: {reasons[kind]}")
            del units[kind]
            continue
        for number, share in sorted(widths.items(), reverse=True):
            cut = partial(prune, model, {kind: share}, importance=importance, batches=batches, refit=refit)
            name = f"{kind} -> {number}"
            try:
                made = unless_not_finite(record, name, say, partial(_cut, cut, held_out, name))
            except LayoutError as error:
                reasons[kind] = "; ".join(f"{one.what} ({one.got})" for one in error.problems)
                say(f"{kind} stay whole: {reasons[kind]}")
                del units[kind]
                found = [cost for cost in found if cost.kind != kind]
                break
            if made is None:
                continue
            smaller, losses = made
            # What the cut costs, and what it saves.
            rise, error = losses.rise_over(whole)
            seconds, whole_seconds = seconds_beside(smaller, model)
            saved, speed = parameters(model) - parameters(smaller), seconds / whole_seconds
            before, domains = units[kind][0].count.units, losses.rises_by_domain(whole)
            one = CutCost(kind, share, number, before, rise, error, saved, speed, domains)
            found.append(one)
            say(f"{name}: loss {100 * rise:+.2f} % +- {error_in_words(error)}, {one.speed:.2f}x the time")
    if not any(kind in units for kind in kinds):
        raise ConfigError(
            "Nothing of this model can be cut",
            got="; ".join(f"{kind}: {reasons.get(kind, 'the model has none')}" for kind in kinds),
            need=f"one of {', '.join(units)}" if units else "a model with units that can be cut",
            try_=f"--cut {','.join(units)}" if units else "tilewright export, which quantises without cutting",
            where="--cut",
        )
    return found


def _cut(cut: Callable[[], Pruned], held_out: Batches, name: str) -> tuple[Any, RowLosses]:
    """A cut model and its losses, for the sensitivities."""
    with stage_named(f"{name}, before recovery"):
        made = cut().model
        return made, row_losses_of(made, held_out)
