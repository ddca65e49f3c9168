"""Rules that round weights to integers: which parts can follow them, and tied weights, which are one decision."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from tilewright.models.base.own_weights import held_weight
from tilewright.precision.assign.module_kinds import Handling, ModuleSite
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.integer.compute_formats import COMPUTE_FORMATS
from tilewright.precision.policy.policy import FormatDecision

Decided = tuple[ModuleSite, FormatDecision]


def why_not_integers(site: ModuleSite, name: str) -> str | None:
    """Why a part's weight cannot be rounded as a rule says; None where it can.

    A row that is no whole number of groups would be exported in another way than it was trained.
    """
    if isinstance(site.module, FrozenFloat8Linear):
        return "its weight is frozen in FP8 and is not trained"
    if site.handling is not Handling.SWAP or not isinstance(site.module, nn.Linear | nn.Embedding):
        return "it multiplies by code of its own"
    if isinstance(site.module, nn.Embedding) and (site.module.max_norm is not None or site.module.sparse):
        return "its rows are renormalised as they are read, or have sparse gradients"
    group, width = COMPUTE_FORMATS[name].group, site.module.weight.shape[1]
    if group and width % group:
        return f"{width} inputs are no multiple of its group of {group}"
    return None


def tied_alike(decided: Sequence[Decided]) -> list[Decided]:
    """One decision for a weight that several parts share: that of the last rule which rounds it.

    An embedding and a head of one matrix are stored once, so one grid must hold for both.
    """
    by_weight: dict[Tensor | None, list[Decided]] = {}
    for site, decision in decided:
        if decision.to_integers and isinstance(site.module, nn.Linear | nn.Embedding):
            by_weight.setdefault(held_weight(site.module), []).append((site, decision))
    found = []
    for site, decision in decided:
        weight = held_weight(site.module) if isinstance(site.module, nn.Linear | nn.Embedding) else None
        named = by_weight.get(weight, []) if isinstance(weight, nn.Parameter) else []
        if named:
            leader, leading = max(named, key=lambda each: each[1].rule or 0)
            if leading.compute != decision.compute:
                reason = f"one weight with {leader.fqn or 'the model'}, so one grid: {leading.reason}"
                plain = decision.operands if decision.gemms is None else leading.matmul
                decision = replace(
                    decision, compute=leading.compute, reason=reason, rule=leading.rule, gemms=None, matmul=plain
                )
        found.append((site, decision))
    return found
