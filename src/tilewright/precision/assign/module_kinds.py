"""Kinds of modules, by type and structure, never by the name of its class.

A site is a module that owns parameters or computes attention, or one weight of a module that owns several it multiplies
by: one row of the precision table. A policy's rules may name the kind of a module instead.

How much of a model's work each of them does is counted in multiplications by weights, per token: 2 FLOPs for each
element of a weight and token that multiplies it, and as much for each of its two gradients. An expert counts for the
tokens that choose it, all experts equally busy. Attention scores are not counted, as they have no weights, nor is how
often a weight is used on other things than tokens: a convolution counts once per position.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from tilewright.models.base.output_layers import find_heads
from tilewright.models.base.own_weights import held_weight, may_multiply
from tilewright.models.base.routers import find_routers, num_experts
from tilewright.precision.float8.third_party import Owned, owned, row_name
from tilewright.precision.mixed.cast_layers import CASTS, Cast, plain_layer
from tilewright.precision.mixed.derived import plain_class
from tilewright.precision.policy.policy import Rule


class Handling(Enum):
    """How a site's formats can be set."""

    SWAP = "swap"
    """One of torch's layers: its class becomes the one of `cast`."""
    SETTING = "setting"
    """It has a `compute_dtype` setting of its own."""
    OWN = "own"
    """It keeps FP32 inside by itself and follows its input's dtype."""
    WEIGHT = "weight"
    """A module known to multiply by weights of its own in one way: its matmuls are given over, see `third_party`."""
    WRAP = "wrap"
    """A norm or router of another party: a region hands it FP32."""
    REGION = "region"
    """It uses its parameters in its own way; the autocast region around it decides."""


@dataclass(frozen=True)
class ModuleSite:
    """One module, or one weight of it, that a policy decides: its kind, its settings, and a remark for the reader."""

    fqn: str
    module: nn.Module
    kind: str
    handling: Handling
    remark: str = ""
    weight: Owned | None = None
    """Which weight of the module, where `handling` is WEIGHT."""

    @property
    def features(self) -> tuple[int, int] | None:
        """The input and output features of a linear layer, or of each layer of a stack."""
        if self.weight is not None:
            return self.weight.features(self.module)
        return (self.module.in_features, self.module.out_features) if isinstance(self.module, nn.Linear) else None

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of a kind of module whose storage the row has."""
        if self.weight is not None:
            return self.weight.parameters(self.module)
        return list(self.module.parameters(recurse=isinstance(self.module, nn.MultiheadAttention)))


def is_own(model: nn.Module) -> bool:
    """True for kinds of models that follow their input's dtype by contract: they have a `residual_dtype` setting."""
    return any("residual_dtype" in vars(module) for module in model.modules())


def find_sites(
    model: nn.Module, rules: Iterable[Rule] = (), *, routers: Iterable[nn.Module] | None = None
) -> list[ModuleSite]:
    """Find all sites of a model by kinds of modules, in the order of `named_modules`. A module in several places is one
    site.

    Args:
        model: any module.
        rules: of a policy; those that name a kind are followed.
        routers: of the model, where they have been found.
    """
    own = is_own(model)
    kinds: dict[nn.Module, str] = dict.fromkeys(find_heads(model), "head")
    kinds |= dict.fromkeys(find_routers(model) if routers is None else routers, "router")
    inside: list[str] = []  # modules that use their children's parameters without calling them
    sites: list[ModuleSite] = []
    for fqn, module in model.named_modules():
        if any(fqn.startswith(prefix) for prefix in inside):
            continue
        named = [rule.kind for rule in rules if rule.kind and rule.matches(fqn, ())]
        sites += _sites(fqn, module, own, kinds.get(module, ""), named[-1] if named else "")
        if isinstance(module, nn.MultiheadAttention):
            inside.append(f"{fqn}." if fqn else "")
        elif is_parametrized(module):
            inside.append(f"{fqn}.parametrizations" if fqn else "parametrizations")
    return sites


def _sites(fqn: str, module: nn.Module, own: bool, found: str, named: str) -> Iterator[ModuleSite]:
    """The sites of one module, by its kind.

    Args:
        fqn: its name.
        module: the module.
        own: the model is one of ours.
        found: its kind where its place in the model tells.
        named: its kind where a rule names it.
    """
    # How formats are set: torch's layers change their class, all others run in a region; what keeps FP32 does so
    # itself or is wrapped.
    owns_parameters = is_parametrized(module) or any(True for _ in module.parameters(recurse=False))
    swap = Handling.SWAP if plain_layer(module) in CASTS or isinstance(module, Cast) else Handling.REGION
    keeps_fp32 = Handling.SWAP if swap is Handling.SWAP else Handling.OWN if own else Handling.WRAP
    kind = named or found
    weights = owned(module)
    # A module that holds its weights as experts or third-party layers do is named by its weights.
    if weights:
        for weight in weights:
            default = "experts" if weight.stacked else "linear"
            yield ModuleSite(row_name(fqn, weight), module, kind or default, Handling.WEIGHT, weight=weight)
    # Then by place and by type; where a rule names a kind, that one is taken.
    elif kind == "router":
        yield ModuleSite(fqn, module, "router", keeps_fp32)
    elif isinstance(module, nn.MultiheadAttention):
        yield ModuleSite(
            fqn, module, "attention", Handling.REGION, "torch's fused attention module with its projections"
        )
    elif isinstance(module, nn.Linear):
        yield ModuleSite(fqn, module, kind or "linear", swap)
    elif isinstance(module, _ConvNd):
        yield ModuleSite(fqn, module, "conv", swap)
    elif isinstance(module, nn.Embedding):
        yield ModuleSite(fqn, module, "embedding", swap)
    elif isinstance(module, _BatchNorm):
        yield ModuleSite(fqn, module, "batch_norm", keeps_fp32)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _InstanceNorm):
        yield ModuleSite(fqn, module, "norm", keeps_fp32)
    elif own and "compute_dtype" in vars(module):
        yield ModuleSite(fqn, module, "attention", Handling.SETTING)
    # The rest: parameters that are vectors alone are a norm's or a scale's.
    elif owns_parameters:
        leaf = next(module.children(), None) is None
        if leaf and all(parameter.ndim <= 1 for parameter in module.parameters(recurse=False)):
            yield ModuleSite(fqn, module, "norm", keeps_fp32, "a norm or scale: its parameters are vectors")
        else:
            yield ModuleSite(fqn, module, "other", Handling.REGION, "uses its parameters in a way of its own")


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
    """True where a kind of module multiplies by its parameters; of code of its own, as far as that tells."""
    return bool(_matrices(site))


def work_of(model: nn.Module, sites: Sequence[ModuleSite], routers: Collection[nn.Module]) -> list[Work]:
    """The work of each site of a model with these routers, by kinds of modules."""
    mixtures = _Mixtures(model, routers)
    found = []
    for site in sites:
        share, elements = mixtures.share(site), sum(map(Tensor.numel, _matrices(site)))
        found.append(Work(2.0 * elements * (share or 1.0), share is not None or not elements))
    return found


def _matrices(site: ModuleSite) -> list[Tensor]:
    """The weights that a kind of module multiplies by."""
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
        """The share of the tokens that a module of experts sees; None where that is not known."""
        return self._shares.get(site.module, 1.0)


def _chosen(modules: Iterable[nn.Module]) -> int | None:
    """How many experts a token has, by the first of the modules of that kind or their configs that says it."""
    for module in modules:
        for holder in (module, getattr(module, "config", None)):
            for name in _CHOSEN:
                if type(value := getattr(holder, name, None)) is int and value > 0:
                    return value
    return None
