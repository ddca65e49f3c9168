"""Modules whose weight is codes: tensors that belong to a module's state and are no numbers to compute with.

Averages of models (torch's `AveragedModel(use_buffers=True)` and most others), noise and norms over "all parameters and
buffers" take both lists for numbers. Codes and their scales are in neither. They are saved, loaded, moved and copied
with their module as buffers are: constants, of which a copied model has those of the moment when it was copied.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn


class HoldsCodes(nn.Module):
    """A module with tensors that `state_dict`, `load_state_dict` (also with `assign=True`), `.to()`, `to_empty` and
    the like treat as buffers, and that are in neither `parameters()` nor `buffers()`."""

    code_attributes: ClassVar[Mapping[str, str]] = {}
    """Names in `state_dict`, each with the plain attribute that holds the tensor."""

    @contextmanager
    def _as_buffers(self) -> Iterator[None]:
        """Inside, a module's codes are buffers: torch's own code moves, saves and loads them."""
        for name, attribute in self.code_attributes.items():
            self._buffers[name] = vars(self)[attribute]
            del vars(self)[attribute]
        try:
            yield
        finally:
            for name, attribute in self.code_attributes.items():
                vars(self)[attribute] = self._buffers.pop(name)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._as_buffers():
            super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._as_buffers():
            super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HoldsCodes":
        with self._as_buffers():
            super()._apply(fn, recurse)
        return self


def codes_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's own codes by their names in its `state_dict`."""
    if not isinstance(module, HoldsCodes):
        return {}
    return {name: getattr(module, name) for name in module.code_attributes}


def named_codes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Codes of a model by their names in its `state_dict`; those that several modules share once for each.

    Example:
        >>> list(named_codes(nn.Linear(2, 2)))
        []
    """
    for prefix, module in model.named_modules():
        for name, codes in codes_of(module).items():
            yield (f"{prefix}.{name}" if prefix else name), codes


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters, buffers and codes by name."""
    held = {**module._parameters, **module._buffers, **codes_of(module)}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def named_constants(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of a model, and codes of its modules, by name.

    Example:
        >>> list(named_constants(nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return {**dict(model.named_buffers()), **dict(named_codes(model))}
