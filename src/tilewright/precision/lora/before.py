"""How a model was before it got adapters: what shared a weight, and what was frozen.

Two layers that share a weight and have adapters of their own are no longer the same matrix once the adapters are added
to it, nor is a layer the same as an embedding that shares its weight. So merged layers have weights of their own.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from tilewright.ops.base.codes import own_tensors

_FROZEN = "frozen_before_lora"
"""Attribute of a module: which of its own parameters were frozen already."""


def shared_weights(model: nn.Module) -> dict[Tensor, list[str]]:
    """Parameters, buffers and codes that several modules of a model own, with the modules' names.

    Example:
        >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> layers[1].weight = layers[0].weight
        >>> list(shared_weights(layers).values())
        [['0', '1']]
    """
    owners: dict[Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for tensor in dict.fromkeys(own_tensors(module).values()):
            owners.setdefault(tensor, []).append(name)
    return {tensor: names for tensor, names in owners.items() if len(names) > 1}


def owns_its_weight(module: nn.Linear) -> bool:
    """Whether a layer's weight is a parameter, and not computed in each forward (weight norm, parametrizations)."""
    return module._parameters.get("weight") is not None


def freeze(model: nn.Module) -> None:
    """Freeze all parameters; those that were frozen before are remembered on their modules."""
    for module in model.modules():
        names = frozenset(name for name, p in module._parameters.items() if p is not None and not p.requires_grad)
        if names:
            setattr(module, _FROZEN, names | getattr(module, _FROZEN, frozenset()))
    model.requires_grad_(False)


def unfreeze(model: nn.Module) -> None:
    """Let all train again but what was frozen before `freeze`. What has been unfrozen meanwhile stays so."""
    kept = [(module, vars(module).pop(_FROZEN, frozenset())) for module in model.modules()]
    frozen = {module._parameters.get(name) for module, names in kept for name in names}
    for param in model.parameters():
        if param not in frozen:
            param.requires_grad_(True)


def listed(names: Iterable[str]) -> str:
    """Some names for a message.

    Example:
        >>> listed(["a", "b", "c", "d"])
        'a, b, c and 1 more'
    """
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
