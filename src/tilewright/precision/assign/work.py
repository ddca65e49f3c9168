"""How much of a model's work each of its parts does: multiplications by weights, per token.

2 FLOPs for each element of a weight and token that multiplies it, and as much for each of its two gradients. An expert
counts for the tokens that choose it, all experts equally busy. Attention scores are not counted, as they have no
weights, nor is how often a weight is used on other things than tokens: a convolution counts once per position.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilewright.models.base.own_weights import held_weight, may_multiply
from tilewright.models.base.routers import num_experts
from tilewright.precision.assign.module_kinds import ModuleSite
from tilewright.precision.mixed.derived import plain_class

_CHOSEN = (
    *("top_k", "topk", "num_chosen", "num_experts_per_tok", "num_experts_per_token", "num_selected_experts"),
    *("moe_top_k", "moe_topk", "moe_k", "top_k_experts"),
)
"""Attributes and settings that say how many experts a token has, as models call them."""


@dataclass(frozen=True)
class Work:
    """FLOPs per token of one matmul (forward, or one of the two gradients), and whether all of it is known."""

    flops: float
    known: bool = True


def multiplies(site: ModuleSite) -> bool:
    """Whether a part multiplies by its parameters; of code of its own, as far as that tells."""
    return bool(_matrices(site))


def work_of(model: nn.Module, sites: Sequence[ModuleSite], routers: Collection[nn.Module]) -> list[Work]:
    """The work of each site of a model with these routers."""
    mixtures = _Mixtures(model, routers)
    found = []
    for site in sites:
        share, elements = mixtures.share(site), sum(map(Tensor.numel, _matrices(site)))
        found.append(Work(2.0 * elements * (share or 1.0), share is not None or not elements))
    return found


def _matrices(site: ModuleSite) -> list[Tensor]:
    """The weights that a part multiplies by."""
    module = site.module
    if site.kind in ("embedding", "norm", "batch_norm"):
        return []
    if site.weight is not None:
        return [getattr(module, site.weight.name)]
    if isinstance(module, nn.Linear):
        weight = held_weight(module)  # a buffer where it is frozen in FP8
        return [torch.empty(module.out_features, module.in_features, device="meta") if weight is None else weight]
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) or site.kind == "conv":
        return [parameter for parameter in site.parameters() if parameter.ndim >= 2]
    named = module.named_parameters(recurse=False)
    return [value for name, value in named if value.ndim >= 2 and may_multiply(plain_class(module), name)]


class _Mixtures:
    """Which modules belong to experts, and what share of the tokens each of them sees."""

    def __init__(self, model: nn.Module, routers: Collection[nn.Module]) -> None:
        self._shares: dict[nn.Module, float | None] = {}
        for parent in model.modules():
            beside = [child for child in parent.children() if child in routers]
            for child in parent.children() if beside else ():
                if child not in routers and (count := num_experts(child)) > 1:
                    chosen = _chosen([child, *beside, parent])
                    share = None if chosen is None else chosen / count
                    self._shares |= dict.fromkeys(child.modules(), share)

    def share(self, site: ModuleSite) -> float | None:
        """Of the tokens, those that a module sees; None where that is not known."""
        return self._shares.get(site.module, 1.0)


def _chosen(modules: Iterable[nn.Module]) -> int | None:
    """How many experts a token has, by the first of the modules or their configs that says it."""
    for module in modules:
        for holder in (module, getattr(module, "config", None)):
            for name in _CHOSEN:
                if type(value := getattr(holder, name, None)) is int and value > 0:
                    return value
    return None
