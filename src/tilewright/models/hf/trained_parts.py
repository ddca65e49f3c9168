"""Which parts of a third-party architecture a task trains, and which it leaves out or never reads.

transformers gives some tasks a part of a model: `causal_lm` of Whisper is its decoder without the encoder, and the
attention to the encoder that stays in the decoder is never used. Found from names and shapes, without weights.
"""

import re
from collections.abc import Iterable

from torch import nn

from tilewright.models.hf.row_lengths import row_use


def untrained_parts(net: nn.Module, whole: nn.Module | None, *, text: bool) -> tuple[list[str], float]:
    """Untrained parts of a transformers architecture, that get no gradient under a task, and their share of all
    parameters.

    Args:
        net: the task's model, built under `row_lengths.real_integers`.
        whole: the architecture without a task, built in the same way; None where there is none.
        text: whether `net` takes rows of ids: what its forward pass does not read is then known, too.

    Returns:
        (module names, `*` for a number, relative to the base model; share from 0 to 1).
    """
    prefix = f"{net.base_model_prefix}."
    sizes = {name.removeprefix(prefix): param.numel() for name, param in net.named_parameters()}
    there = {name.removeprefix(prefix) for name, _ in net.named_parameters(remove_duplicate=False)}
    unused = row_use(net).unused if text else None
    untrained = {name.removeprefix(prefix) for name in unused or ()}
    for names, size in _named_sizes(whole) if whole is not None else ():
        if there.isdisjoint(suffix for name in names for suffix in _suffixes(name)):
            untrained.add(min(names))
            sizes[min(names)] = size
    share = sum(sizes[name] for name in untrained) / sum(sizes.values())
    return _modules(untrained, sizes.keys() - untrained), share


def _named_sizes(net: nn.Module) -> Iterable[tuple[set[str], int]]:
    """Named sizes of trained parts: (all names, numbers) of each parameter; a tied one has several names."""
    names: dict[int, set[str]] = {}
    sizes: dict[int, int] = {}
    for name, param in net.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
        sizes[id(param)] = param.numel()
    return [(names[key], sizes[key]) for key in names]


def _modules(untrained: set[str], trained: Iterable[str]) -> list[str]:
    """Name the untrained parameters by the largest modules that hold nothing trained, numbers of layers folded."""
    kept = {prefix for name in trained for prefix in _prefixes(name)}
    found = (next((p for p in _prefixes(name) if p not in kept), name) for name in sorted(untrained))
    return sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in found})


def _suffixes(name: str) -> list[str]:
    """The names that a part may have inside a part of the architecture: its name and the ends of it."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
