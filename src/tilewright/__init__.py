"""Train large transformers on little hardware, and show the numbers.

The names below are imported when they are first used, so that `import tilewright` stays fast and
does not import torch.
"""

import importlib

__version__ = "0.1.0"

# Public name -> where it lives. The frozen surface: a change here goes into CHANGELOG.md.
_PUBLIC = {
    "Recipe": "tilewright.core.config",
    "load_recipe": "tilewright.core.load",
    "TilewrightError": "tilewright.core.errors",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
