"""First values of a Hugging Face model that has no memory yet, in pieces: what `memory.offload.lazy_params` fills its
layer groups with.

    values = random_values(model, seed)  # of `models.build`; or stored_values(model, folder)
    values({"net.model.layers.3.mlp.up_proj.weight": tensor, ...})

Each tensor gets the same values as the whole model does by `build.init_weights` or by loading the folder, whatever
other tensors are asked for with it. Called where a recipe keeps parameters off the device, or in shards. Of a tensor
that is asked for in part, only its rows are read; the model's own initialisation draws whole modules: its parameters
pass by whole, in FP32, one at a time.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tilewright.models.base.protocols import ALL_WHOLE, InitialValues
from tilewright.models.decoder.hf_weights import copy_stored
from tilewright.models.folder.fp8_weights import find_weights
from tilewright.models.folder.safetensors import INDEX, SINGLE, scan_folder
from tilewright.models.hf.convert_weights import converted_values
from tilewright.models.hf.load import draw_module, load_hf, weight_owners
from tilewright.models.hf.model import HFModel
from tilewright.ops.base.code_modules import named_constants

_NET = "net."
"""What is before the names of a Hugging Face model in ours."""


def random_hf(model: HFModel, seed: int) -> InitialValues:
    """Lazy random initial weights of a Hugging Face model, those of `build.init_weights`. The model may be on the meta
    device."""
    return functools.partial(_draw, model.net, seed)


def stored_hf(model: HFModel, folder: Path | str) -> InitialValues:
    """Lazy first values of a Hugging Face model from its folder, in pieces. The model may be on the meta device.

    Where a folder does not hold all that the model has under the names that transformers looks for, transformers has to
    load it whole: then a copy of the model in host memory, in FP32, stays as long as what is returned. The model's
    `notes` say so.

    Raises:
        CheckpointError: the folder is not whole, or not of this model.
    """
    values = direct_values(model, folder) or _converted_values(model, folder)
    if values is not None:
        return values
    model.notes.append("The folder's weights have other names than the model's: they are loaded whole before use.")
    loaded = load_hf(folder, model.task, "load", kernels=model.kernels).net.state_dict()
    return functools.partial(_copy_stored, model.net, _kept_names(model.net), functools.partial(_copy_from, loaded))


def _converted_values(model: HFModel, folder: Path | str) -> InitialValues | None:
    """A reader, one by one, of a folder's weights whose names transformers converts; None if some are missing."""
    if not _has_safetensors(folder):
        return None
    stored = scan_folder(folder)
    coded = find_weights(folder, stored)
    weights = {name: tensor for name, tensor in stored.items() if name not in {w.scale_name for w in coded.values()}}
    values = converted_values(model.net, weights, functools.partial(copy_stored, stored, coded))
    if values is None:
        return None
    return functools.partial(_copy_stored, model.net, _kept_names(model.net), values)


def _has_safetensors(folder: Path | str) -> bool:
    return any((Path(folder) / name).is_file() for name in (SINGLE, INDEX))


def direct_values(model: HFModel, folder: Path | str, without: Collection[str] = ()) -> InitialValues | None:
    """A reader, one by one, of a Hugging Face folder's weights under the model's own names; else None.

    Args:
        model: may be on the meta device.
        folder: with weights in safetensors.
        without: names in `model.net` that no folder holds.

    Raises:
        CheckpointError: the folder is not whole.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.net.named_parameters()}
    own |= {name: tuple(tensor.shape) for name, tensor in _persistent(model.net).items()}
    if not _has_safetensors(folder):
        return None
    stored = scan_folder(folder)
    if not all(n in without or (n in stored and stored[n].shape == shape) for n, shape in own.items()):
        return None
    values = functools.partial(copy_stored, stored, find_weights(folder, stored))
    return functools.partial(_copy_stored, model.net, _kept_names(model.net), values)


def _persistent(net: nn.Module) -> dict[str, Tensor]:
    """The persistent values of a model that are not parameters: buffers that are saved, and codes."""
    kept = net.state_dict(keep_vars=True)
    return {name: held for name, held in named_constants(net).items() if name in kept}


@torch.no_grad()
def _copy_from(
    source: Mapping[str, Tensor], tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] = ALL_WHOLE
) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(_rows_like(tensor, source[name], first_rows.get(name, 0)))


def _rows_like(tensor: Tensor, whole: Tensor, first_row: int) -> Tensor:
    return whole[first_row : first_row + len(tensor)] if tensor.ndim else whole


def _kept_names(net: nn.Module) -> Callable[[], frozenset[str]]:
    """The names in a checkpoint of the model. They are looked up at the first call only, before the model is
    converted."""
    return functools.cache(lambda: frozenset(net.state_dict(keep_vars=True)))


def _copy_stored(
    net: nn.Module,
    kept_names: Callable[[], frozenset[str]],
    copy: InitialValues,
    tensors: Mapping[str, Tensor],
    first_rows: Mapping[str, int] = ALL_WHOLE,
) -> None:
    """Copy the stored values that a folder holds, lazily; buffers that no folder holds are computed as transformers
    does."""
    kept = kept_names()
    named = {name.removeprefix(_NET): tensor for name, tensor in tensors.items()}
    computed = {_NET + name: tensor for name, tensor in named.items() if name not in kept}
    if computed:
        _draw(net, 0, computed)
    first = {name.removeprefix(_NET): row for name, row in first_rows.items()}
    copy({name: tensor for name, tensor in named.items() if name in kept}, first)


@torch.no_grad()
def _draw(net: nn.Module, seed: int, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] = ALL_WHOLE) -> None:
    """Draw some parameters by transformers' own initialisation, while the others share one scratch buffer.

    Modules are initialised as in `load.init_hf`: some draw for all that is below them, so each module runs that has
    a wanted tensor in it, and draws what it would draw for the whole model.
    """
    wanted = {name.removeprefix(_NET): tensor for name, tensor in tensors.items()}
    params = dict(net.named_parameters())
    before = {name: param.data for name, param in params.items()}
    fresh = {name: torch.empty(param.shape) for name, param in params.items() if name in wanted}
    scratch = torch.empty(max((p.numel() for name, p in params.items() if name not in wanted), default=0))
    owners = weight_owners(net)
    try:
        for name, param in params.items():
            param.data = fresh[name] if name in wanted else scratch[: param.numel()].view(param.shape)
        with torch.random.fork_rng(devices=[]):
            for name, module in reversed(list(net.named_modules())):
                if any(_is_inside(tensor, name) for tensor in wanted):
                    draw_module(owners[name], name, module, seed)
    finally:
        for name, param in params.items():
            param.data = before[name]
    buffers = dict(net.named_buffers())
    for name, tensor in wanted.items():
        whole = fresh[name] if name in fresh else buffers[name]
        tensor.copy_(_rows_like(tensor, whole, first_rows.get(_NET + name, 0)))


def _is_inside(tensor: str, module: str) -> bool:
    return not module or tensor.startswith(module + ".")
