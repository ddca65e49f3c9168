"""A Hugging Face model with adapters filled tensor by tensor, so that it never takes more than what it is to take.

    model = build_model(section, vocab_size, kernels, "meta")
    add_lora(model, ...), convert(model, policy)  # formats are chosen on meta
    fill_adapted(model, folder, device, seed)

transformers loads all weights in one format, in a process that maps the whole file: for adapters on an FP8 base six
bytes per weight for a while, and one afterwards.
"""

from pathlib import Path
from typing import cast

import torch
from torch import nn

from tilewright.models.base.protocols import Model
from tilewright.models.folder.safetensors import INDEX, SINGLE
from tilewright.models.hf.model import HFModel
from tilewright.models.layerwise.lazy_init import direct_values
from tilewright.ops.base.code_modules import codes_of
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.lora.lora import init_lora

_ADAPTER = ("lora_A", "lora_B")


def can_fill(model: Model, folder: Path | str) -> bool:
    """True where adapters' models can be filled lazily: `fill_adapted` can fill this one from the folder: the names
    there are the model's own.

    Args:
        model: on the meta device, without adapters yet.

    Raises:
        CheckpointError: the folder is not whole.
    """
    there = any((Path(folder) / name).is_file() for name in (SINGLE, INDEX))
    return there and direct_values(cast(HFModel, model), folder) is not None


@torch.no_grad()
def fill_adapted(model: Model, folder: Path | str, device: torch.device | str, seed: int) -> None:
    """Give an adapted model on the meta device its memory and values, in the formats that it has there.

    FP8 layers get the folder's codes as they are, or are encoded one at a time. Parameters are new objects afterwards,
    tied ones stay tied: make the optimizer later.

    Args:
        model: with adapters, converted.
        folder: of which `can_fill` says that it can.
        device: where the model goes.
        seed: of the adapters' initial values.

    Raises:
        CheckpointError: the folder is not whole, or holds NaN.
    """
    scales = [f"{name}.weight_scale_inv" for name, part in model.net.named_modules() if _frozen(part)]
    adapters = [name for name, _ in model.net.named_parameters() if name.endswith(_ADAPTER)]
    values = direct_values(cast(HFModel, model), folder, {*scales, *adapters})
    if values is None:
        raise AssertionError("can_fill has said that the folder's names are the model's")
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if _frozen(module):
            _allocate(module, device)
            values({f"{prefix}.{name}": codes for name, codes in codes_of(module).items()})
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            if param not in made:
                value = torch.empty_like(param, device=device)
                if name not in _ADAPTER:
                    values({f"{prefix}.{name}": value})
                made[param] = nn.Parameter(value, param.requires_grad)
                vars(made[param]).update(vars(param))
            module._parameters[name] = made[param]
    # Last: what no folder holds is computed by the modules' own initialisation, which wants parameters that are there.
    left = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    for module in model.modules():
        _allocate(module, device)
    values({name: buffer for name, buffer in model.named_buffers() if name in left})
    init_lora(model, seed)


def _frozen(module: nn.Module) -> bool:
    return isinstance(module, FrozenFloat8Linear) and module.weight.is_meta


def _allocate(module: nn.Module, device: torch.device | str) -> None:
    """Memory for a lazily loaded module's own buffers and codes."""
    for name, buffer in (module._buffers | codes_of(module)).items():
        if buffer is not None and buffer.is_meta:
            setattr(module, name, torch.empty_like(buffer, device=device))
