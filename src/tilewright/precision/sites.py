"""What kind of thing each module of a model is, by type and structure, never by the name of its class.

A site is a module that owns parameters or computes attention: one row of the precision table. Called by `convert`.
"""

from dataclasses import dataclass
from enum import Enum

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from tilewright.models.routers import find_routers
from tilewright.precision.cast import CASTS, Cast


class Handling(Enum):
    """How a site's formats can be set."""

    SWAP = "swap"
    """One of torch's layers: its class becomes the one of `cast`."""
    SETTING = "setting"
    """It has a `compute_dtype` setting of its own."""
    OWN = "own"
    """It keeps FP32 inside by itself and follows its input's dtype."""
    WRAP = "wrap"
    """A norm or router of somebody else: a region hands it FP32."""
    REGION = "region"
    """It uses its parameters in its own way; the autocast region around it decides."""


@dataclass(frozen=True)
class Site:
    """One row: a module, what it is, how it can be set, and a remark for the reader."""

    fqn: str
    module: nn.Module
    kind: str
    handling: Handling
    remark: str = ""


def is_own(model: nn.Module) -> bool:
    """True for models that follow their input's dtype by contract: they have a `residual_dtype` setting."""
    return any("residual_dtype" in vars(module) for module in model.modules())


def find_sites(model: nn.Module) -> list[Site]:
    """All sites of a model in the order of `named_modules`. A module in several places is one site."""
    own = is_own(model)
    head = _head(model)
    routers = set(find_routers(model))
    inside: list[str] = []  # modules that use their children's parameters without calling them
    sites = []
    for fqn, module in model.named_modules():
        if any(fqn.startswith(prefix) for prefix in inside):
            continue
        site = _site(fqn, module, own, "head" if module is head else "", module in routers)
        if site is not None:
            sites.append(site)
            if isinstance(module, nn.MultiheadAttention):
                inside.append(f"{fqn}." if fqn else "")
    return sites


def _site(fqn: str, module: nn.Module, own: bool, head: str, router: bool) -> Site | None:
    owns_parameters = any(True for _ in module.parameters(recurse=False))
    swap = Handling.SWAP if type(module) in CASTS or isinstance(module, Cast) else Handling.REGION
    keeps_fp32 = Handling.SWAP if swap is Handling.SWAP else Handling.OWN if own else Handling.WRAP
    if router:
        return Site(fqn, module, "router", keeps_fp32)
    if isinstance(module, nn.MultiheadAttention):
        return Site(fqn, module, "attention", Handling.REGION, "torch's fused attention module with its projections")
    if isinstance(module, nn.Linear):
        return Site(fqn, module, head or "linear", swap)
    if isinstance(module, _ConvNd):
        return Site(fqn, module, "conv", swap)
    if isinstance(module, nn.Embedding):
        return Site(fqn, module, "embedding", swap)
    if isinstance(module, _BatchNorm):
        return Site(fqn, module, "batch_norm", keeps_fp32)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _InstanceNorm):
        return Site(fqn, module, "norm", keeps_fp32)
    if own and "compute_dtype" in vars(module):
        return Site(fqn, module, "attention", Handling.SETTING)
    if not owns_parameters:
        return None
    leaf = next(module.children(), None) is None
    if leaf and all(parameter.ndim <= 1 for parameter in module.parameters(recurse=False)):
        return Site(fqn, module, "norm", keeps_fp32, "a norm or scale: its parameters are vectors")
    return Site(fqn, module, "other", Handling.REGION, "uses its parameters in a way of its own")


def _head(model: nn.Module) -> nn.Module | None:
    """The output projection onto a vocabulary: the linear layer that shares an embedding's parameter, else the last
    linear layer of the model if it is as wide as an embedding is long."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tied = [linear for linear in linears if any(linear.weight is embedding.weight for embedding in embeddings)]
    if tied:
        return tied[-1]
    if linears and any(linears[-1].out_features == embedding.num_embeddings for embedding in embeddings):
        return linears[-1]
    return None
