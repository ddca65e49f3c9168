"""Structured pruning of a model: how many units of each kind stay, which, and the smaller model.

    pruned = prune(model, {"ffn": 0.25}, importance="activation", batches=batches)
    pruned.model.save_hf(folder)

Legend: U units.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tilewright.compress.prune.batch_norms import estimate_norms
from tilewright.compress.prune.cut_model import Kept, LayoutError, cut, difference, limit, losses_of
from tilewright.compress.prune.refit import can_fit
from tilewright.compress.prune.refit import refit as fit_readers
from tilewright.compress.prune.tensors_of_units import find_units
from tilewright.compress.prune.unit_kinds import Kind
from tilewright.compress.prune.unit_places import Place, UnitGroup
from tilewright.compress.prune.unit_readers import Batch
from tilewright.compress.prune.unit_scores import Method, Scores, score
from tilewright.core.errors import ConfigError, NumericsError, Problem

MULTIPLE: Mapping[Kind, int] = {"ffn": 32, "expert_channels": 32}
"""Widths are multiples of this: rows of the tiles that CPUs and GPUs multiply. Heads, experts and layers stay whole."""


@dataclass(frozen=True)
class Pruned:
    """A smaller model.

    Args:
        model: dense, and as trainable as the one that it was made of.
        before, after: units of a layer (of layers: of the model), by kind that was cut.
        kept: which units stay, by kind and place.
        whole: kinds that this model has and cannot be cut in, with the reason.
        fitted: whether the layers behind a cut are fitted, by kind for which that was tried.
    """

    model: Any
    before: dict[Kind, int] = field(default_factory=dict)
    after: dict[Kind, int] = field(default_factory=dict)
    kept: dict[Kind, Kept] = field(default_factory=dict)
    whole: dict[Kind, str] = field(default_factory=dict)
    fitted: dict[Kind, bool] = field(default_factory=dict)


def prune(
    model: Any,
    shares: Mapping[Kind, float],
    *,
    importance: Method = "activation",
    batches: Sequence[Batch] = (),
    multiple: Mapping[Kind, int] = MULTIPLE,
    seed: int = 0,
    refit: bool = False,
) -> Pruned:
    """Prune a model: cut a share of the units of some kinds. The given model is left as it was.

    Kind by kind in the order of `shares`, layers last: the only dense ones may be among them. Each is scored on what is
    left by then.

    Args:
        model: a `models.base.protocols.Model` on the host, FP32 or FP64.
        shares: how much goes, by kind: at least 0, below 1. The number that stays is rounded to `multiple`.
        importance: which units stay, see `unit_scores`.
        batches: for importance by activation and taylor, and for `refit`.
        multiple: of what stays, by kind.
        seed: of random importance.
        refit: fit the layers behind each cut to what they gave out before, on the batches (`refit.refit`), where that
            brings their losses nearer to the model's, and measure the statistics of batch norms again
            (`norms.estimate_norms`).

    Raises:
        ConfigError: a share out of range, or a kind that this model has not or that cannot be cut in it (LayoutError,
            where that shows when it is cut).
        NumericsError: scores or losses are not finite.

    Example:
        >>> from tilewright.models.build import init_weights
        >>> from tilewright.models.decoder.decoder import Decoder, DecoderConfig
        >>> model = Decoder(DecoderConfig.of(vocab_size=50, dim=32, num_heads=4, num_kv_heads=2, num_layers=2))
        >>> init_weights(model, seed=0)
        >>> pruned = prune(model, {"ffn": 0.5, "heads": 0.5}, importance="l1")
        >>> pruned.after, pruned.model.config.num_heads
        ({'ffn': 64, 'heads': 1}, 2)
    """
    _check_shares(shares)
    found, whole = find_units(model)
    missing = [kind for kind in shares if kind not in found]
    if refit and not batches:
        raise AssertionError("refit needs batches")
    if missing:
        raise ConfigError.from_problems([_no_such(kind, found, whole) for kind in missing])
    pruned = Pruned(model, whole=dict(whole))
    for kind in sorted(shares, key=lambda kind: kind == "layers"):
        ways = find_units(pruned.model)[0][kind]
        number = left(ways[0], shares[kind], multiple.get(kind, 1))
        pruned.before[kind], pruned.after[kind] = ways[0].count.units, number
        if number < ways[0].count.units:
            pruned = _cut_kind(pruned, ways, number, importance, batches, seed, refit)
    return pruned


def left(units: UnitGroup, share: float, multiple: int) -> int:
    """Round the number of units that stay after pruning to the nearest multiple: not fewer than the model needs, at
    most all.

    Args:
        units: of a kind.
        share: that goes.
        multiple: of what stays.
    """
    count = units.count
    rounded = round(count.units * (1 - share) / multiple) * multiple
    return min(count.units, max(rounded, -(-count.least // multiple) * multiple))


def best(scores: Scores, number: int, parts: Mapping[Place, int] = MappingProxyType({})) -> Kept:
    """Choose the units that stay after pruning: those with the highest scores at each place, in ascending order; of
    equal ones the first.

    Args:
        scores: of units.
        number: that stays.
        parts: see `UnitGroup`.

    Example:
        >>> best({(0,): torch.tensor([1.0, 3.0, 2.0, 3.0])}, 2)
        {(0,): tensor([1, 3])}
    """
    return {place: _best(score_U, number * parts.get(place, 1)) for place, score_U in scores.items()}


def _best(score_U: Tensor, number: int) -> Tensor:
    return score_U.argsort(descending=True, stable=True)[:number].sort().values


def _cut_kind(
    pruned: Pruned,
    ways: Sequence[UnitGroup],
    number: int,
    importance: Method,
    batches: Sequence[Batch],
    seed: int,
    refit: bool,
) -> Pruned:
    """Prune a kind of unit in the first way of laying tensors out whose result is right."""
    model, kind, seen = pruned.model, ways[0].kind, []
    for units in ways:
        kept = best(score(model, units, importance, batches, seed), number, units.parts)
        made = cut(model, units, kept)
        seen.append(difference(model, units, kept, made))
        if seen[-1] <= limit(model, kind):
            found = replace(pruned, model=made, kept=pruned.kept | {kind: kept})
            return _refitted(model, units, found, batches) if refit else found
    if not all(map(torch.isfinite, torch.tensor(seen))):
        raise NumericsError(
            "Losses are not finite where a cut is tried",
            got="NaN or infinite losses of two short rows",
            need="finite weights",
            try_="an earlier checkpoint of the run",
        )
    raise LayoutError(
        f"Layout of {kind} is not understood",
        got=f"losses of the cut model differ by {min(seen):.1e} of their mean from those with the units at zero",
        need=f"at most {limit(model, kind):.1e}",
        try_="other kinds of unit; this one stays whole",
        where=type(model.net).__name__,
    )


def _refitted(model: Any, units: UnitGroup, pruned: Pruned, batches: Sequence[Batch]) -> Pruned:
    """A pruned model with batch norms measured again, and with fitted layers where the losses on the batches are nearer
    to the model's own with them. Each fit is to what the model reads, not to what the cut one does: where many follow
    each other, as in a deep cut of a ResNet, that may be worse than none.

    Args:
        model: before the cut.
        units: that were cut.
        pruned: after it.
        batches: text or images.
    """
    estimate_norms(pruned.model, batches)
    if not can_fit(units):
        return pruned
    kept = pruned.kept[units.kind]
    fitted = cut(model, units, kept)
    fit_readers(model, units, kept, fitted, batches)
    estimate_norms(fitted, batches)
    whole = losses_of(model, batches)
    plain, better = (float((losses_of(one, batches) - whole).abs().sum()) for one in (pruned.model, fitted))
    known = pruned.fitted | {units.kind: better <= plain}
    return replace(pruned, model=fitted if better <= plain else pruned.model, fitted=known)


def _check_shares(shares: Mapping[Kind, float]) -> None:
    wrong = [f"{kind} = {share:g}" for kind, share in shares.items() if not 0 <= share < 1]
    if wrong or not shares:
        raise ConfigError(
            "Share of units to cut is out of range",
            got=", ".join(wrong) or "none",
            need="at least one kind, with a share from 0 to below 1",
            try_='{"ffn": 0.25}',
        )


def _no_such(kind: str, found: Mapping[Kind, object], whole: Mapping[Kind, str]) -> Problem:
    return Problem(
        f"Units of kind {kind} cannot be cut in this model",
        got=whole.get(kind, "it has none"),  # type: ignore[call-overload]
        need=f"one of {', '.join(found)}" if found else "a model with units that can be cut",
        try_=f"{next(iter(found))} instead" if found else "another model",
    )
