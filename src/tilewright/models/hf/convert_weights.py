"""Weights of a folder whose names or shapes are not those of the model, read one by one and row by row.

transformers renames, stacks, splits and merges what it loads. Its own rules are followed here with tensors without
bytes, once; afterwards any parameter can be read alone. Rows of stacked experts are experts: only those are read.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.models.base.protocols import ALL_WHOLE, InitialValues
from tilewright.models.folder.row_wise import Recorded, read_rows
from tilewright.models.folder.safetensors import StoredTensor
from tilewright.ops.base.code_modules import named_constants

_BLOCK_BYTES = 64 * 2**20
"""Of a parameter's FP32 values read at a time, or one row."""


def converted_values(net: Any, stored: Mapping[str, StoredTensor], copy_stored: InitialValues) -> InitialValues | None:
    """A reader of a folder's weights whose names or shapes transformers converts; None if some are missing.

    Args:
        net: a `PreTrainedModel`, perhaps on the meta device, as transformers makes it.
        stored: tensors of the folder, without the scales of FP8 weights.
        copy_stored: copies stored tensors under their own names into FP32 ones.
    """
    made = _follow(net, stored)
    own = dict(net.named_parameters()) | {
        name: held for name, held in named_constants(net).items() if name in net.state_dict()
    }
    if any(name not in made or made[name].shape != tensor.shape for name, tensor in own.items()):
        return None

    def read(name: str, start: int, stop: int) -> Tensor:
        shape = stored[name].shape
        rows = torch.empty((stop - start, *shape[1:]) if shape else ())
        copy_stored({name: rows}, {name: start} if shape else ALL_WHOLE)
        return rows

    def copy_converted(tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] = ALL_WHOLE) -> None:
        for name, tensor in tensors.items():
            _copy_rows(made[name], tensor, first_rows.get(name, 0), read)

    return copy_converted


@torch.no_grad()
def _copy_rows(source: Recorded, target: Tensor, first: int, read: Callable[[str, int, int], Tensor]) -> None:
    if target.ndim == 0:
        target.copy_(read_rows(source, 0, 0, read))
        return
    step = max(1, _BLOCK_BYTES // max(1, 4 * target[:1].numel()))
    for start in range(0, len(target), step):
        stop = min(start + step, len(target))
        target[start:stop].copy_(read_rows(source, first + start, first + stop, read))


def _follow(net: Any, stored: Mapping[str, StoredTensor]) -> dict[str, Recorded]:
    """Make a model's tensors from stored ones as transformers (seen in 5.23) converts them, by the model's names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(net)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own, prefix = net.state_dict(), net.base_model_prefix
    gathered: dict[str, Any] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], prefix, own)
        if name not in own:
            continue
        if pattern is None:
            rule = gathered.setdefault(name, WeightRenaming(key, name))
        else:
            rule = gathered.setdefault(name, copy.deepcopy(converter_of[pattern]))
        rule.add_tensor(name, key, pattern or key, Recorded.stored(key, stored[key].shape))
    made = {}
    for name, rule in gathered.items():
        try:
            found = rule.convert(name, model=net, config=net.config)
        except (NotImplementedError, RuntimeError, ValueError):
            continue  # it asks for bytes, or the tensors do not fit together: loading the whole says what is wrong
        made |= {target: tensor[0] if isinstance(tensor, list) else tensor for target, tensor in found.items()}
    return made
