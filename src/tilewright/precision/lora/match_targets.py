"""The linear layers that get an adapter: names that match the targets of `[lora]`, else an error with near names."""

import difflib
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from tilewright.core.errors import ConfigError


def matching(names: Collection[str], targets: Sequence[str]) -> list[str]:
    """The names of linear layers that a LoRA target matches.

    Raises:
        ConfigError: a target that matches none.
    """
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            raise ConfigError(
                "Adapter target matches no linear layer",
                got=repr(pattern),
                need="a glob on the name of a linear layer; heads, routers and embeddings get no adapter",
                try_=(f"near names: {', '.join(close)}\nor " if close else "") + _endings(names),
                where="targets",
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in targets)]


def _endings(names: Collection[str]) -> str:
    """The endings of layers' names as globs, for a message on LoRA targets."""
    last = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return (
        "targets among " + ", ".join(f"*{name}" for name in list(last)[:12]) if last else "a model with linear layers"
    )
