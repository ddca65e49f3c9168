"""Exact bytes of a model and its optimizer by owner, each storage counted once.

Parameters, their gradients, optimizer states, and buffers: registered ones and the tensors that modules keep
as plain attributes, such as the low-precision weight copies of `precision.convert`. Activations have no
owner object to ask, so they are not counted here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_REGISTRIES = ("_parameters", "_buffers", "_modules")


def owner_bytes(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, device_type: str) -> dict[str, int]:
    """Tensors' bytes on `device_type` by owner: parameters, optimizer, gradients, buffers.

    A storage shared by several tensors (tied embeddings, views) counts once, for the first owner in that order.
    Of a DTensor the local part counts.
    """
    seen: set[int] = set()

    def unique(tensors: Iterable[Tensor]) -> int:
        return sum(_new_storage_bytes(t, seen, device_type) for t in tensors)

    params = list(model.parameters()) if model is not None else []
    result = {"parameters": unique(params)}
    result["optimizer"] = unique(_tensors_in(optimizer.state if optimizer is not None else None))
    result["gradients"] = unique(p.grad for p in params if p.grad is not None)
    result["buffers"] = unique(_module_tensors(model) if model is not None else ())
    return result


def storage_bytes(tensors: Iterable[Tensor], device_type: str) -> int:
    """Bytes of the tensors' storages on `device_type`, each once; of a DTensor the local part."""
    seen: set[int] = set()
    return sum(_new_storage_bytes(tensor, seen, device_type) for tensor in tensors)


def _new_storage_bytes(tensor: Tensor, seen: set[int], device_type: str) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.device.type != device_type or tensor.layout is not torch.strided:
        return 0
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen or storage.nbytes() == 0:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def _module_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors of a module whose bytes are counted: buffers, and those in the modules' other attributes (parameters come
    out too and are already seen)."""
    for module in model.modules():
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
        for name, value in vars(module).items():
            if name not in _REGISTRIES:
                yield from _tensors_in(value)


def _tensors_in(value: object, depth: int = 4) -> Iterator[Tensor]:
    """Tensors whose bytes are counted inside nested mappings, sequences and dataclasses, modules not entered."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (str, bytes, int, float, nn.Module, type)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item, depth - 1)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name, None), depth - 1)
