"""Modules that train as a whole beside adapters, and are saved with them: peft's `modules_to_save`.

For new tokens or a new layout an adapter is not enough: embeddings and head learn too. They train in place, so a weight
that two modules share stays shared: both must be named.

Shared weights and what was frozen are found before adapters are added: two layers that share a weight and have adapters
of their own are no longer the same matrix, nor is a layer the same as an embedding that shares its weight.
"""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.ops.base.code_modules import own_tensors

_FROZEN = "frozen_before_lora"
"""Attribute of a module: which of its own parameters were frozen already."""


def shared_weights(model: nn.Module) -> dict[Tensor, list[str]]:
    """Parameters, buffers and codes that several modules of a model share, with the modules' names.

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
    """True where a layer owns its weight, to save it: a parameter, not computed in each forward (weight norm,
    parametrizations)."""
    return module._parameters.get("weight") is not None


def freeze(model: nn.Module) -> None:
    """Freeze all parameters beside modules to save; those that were frozen before are remembered on their modules."""
    for module in model.modules():
        names = frozenset(name for name, p in module._parameters.items() if p is not None and not p.requires_grad)
        if names:
            setattr(module, _FROZEN, names | getattr(module, _FROZEN, frozenset()))
    model.requires_grad_(False)


def unfreeze(model: nn.Module) -> None:
    """Unfreeze all parameters, modules to save or not, but what was frozen before `freeze`. What has been unfrozen
    meanwhile stays so."""
    kept = [(module, vars(module).pop(_FROZEN, frozenset())) for module in model.modules()]
    frozen = {module._parameters.get(name) for module, names in kept for name in names}
    for param in model.parameters():
        if param not in frozen:
            param.requires_grad_(True)


def listed(names: Iterable[str]) -> str:
    """Some names of modules to save listed for a message.

    Example:
        >>> listed(["a", "b", "c", "d"])
        'a, b, c and 1 more'
    """
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_SAVED = "saved_with_lora"
"""Attribute of a module that trains as a whole."""


def find_saved(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Find modules to save: names of those that patterns name: whole names, their last parts, or globs.

    Raises:
        ConfigError: a pattern that names none, or a module that shares a weight with one that is not named.

    Example:
        >>> find_saved(nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)}), ["head"])
        ['head']
    """
    # Modules without parameters have nothing to save.
    owners = {
        name: module for name, module in model.named_modules() if name and next(module.parameters(), None) is not None
    }
    found: dict[str, None] = {}
    for pattern in patterns:
        mine = [name for name in owners if fnmatchcase(name, pattern) or name.endswith(f".{pattern}")]
        if not mine:
            close = difflib.get_close_matches(pattern, [name.rpartition(".")[2] for name in owners], n=3, cutoff=0.4)
            raise ConfigError(
                "Name of a module to save is no module's",
                got=repr(pattern),
                need="the name of a module with parameters, its last part, or a glob",
                try_=f"near names: {', '.join(dict.fromkeys(close))}" if close else "embed_tokens, lm_head",
                where="lora.modules_to_save",
            )
        found |= dict.fromkeys(mine)
    # A tied weight trains or is frozen; it cannot do both under two names.
    for names in shared_weights(model).values():
        chosen = [name for name in names if _inside(name, found)]
        if chosen and len(chosen) < len(names):
            others = [name.rpartition(".")[2] for name in names if name not in chosen]
            raise ConfigError(
                "Module to save shares its weight with one that is not saved",
                got=f"{listed(chosen)}, whose weight is that of {listed(others)} too",
                need="both: the weight stays shared",
                try_=f"modules_to_save = {[*patterns, *others]}".replace("'", '"'),
                where="lora.modules_to_save",
            )
    return list(found)


def train_saved(model: nn.Module, names: Sequence[str]) -> None:
    """Train modules to save, and remember them."""
    for name in names:
        module = model.get_submodule(name)
        setattr(module, _SAVED, True)
        module.requires_grad_(True)


def saved_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules to save that train as a whole beside adapters, by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, _SAVED, False)}


def forget_saved(model: nn.Module) -> None:
    """Forget which modules are to be saved: they are as all others again."""
    for module in saved_modules(model).values():
        delattr(module, _SAVED)


def _inside(name: str, modules: dict[str, None]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
