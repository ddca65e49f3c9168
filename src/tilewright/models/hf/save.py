"""A transformers model as a Hugging Face folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tilewright.core.errors import CheckpointError
from tilewright.formats.fp8_layout import CODE_DTYPE, layout_settings
from tilewright.models.folder.fp8_weights import encode_folder
from tilewright.models.folder.json_file import read_json, write_json
from tilewright.models.folder.safetensors import check_no_adapters
from tilewright.models.folder.spill import spilled
from tilewright.models.hf.fp8_names import plan_fp8


def save_folder(
    net: Any,
    folder: Path,
    dtype: torch.dtype,
    extra: Mapping[str, Any],
    live: Callable[[str, Tensor], Tensor] | None,
) -> None:
    """Save a transformers model as a Hugging Face folder; see `protocols.Model.save_hf`.

    config.json is the model's own but for the dtype, and for `extra`. For FP8 the weights are written in FP32 first,
    then file by file in FP8, so the disk must hold them in FP32.

    Args:
        net: a `PreTrainedModel`.
        folder: made where it is not there.
        dtype: of what is stored.
        extra: entries of config.json beside the model's own.
        live: gives the values of a tensor `net.NAME`; None: as they are.

    Raises:
        CheckpointError: the model has adapters, nothing of it can be stored in FP8, or the folder cannot be written.
    """
    plan = plan_fp8(net) if dtype == CODE_DTYPE else None
    rest, first = (dtype, dtype) if plan is None else (torch.bfloat16, torch.float32)
    check_no_adapters(net.state_dict(), folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with spilled(folder) as spill:
            net.save_pretrained(folder, state_dict=_state_to_store(net, first, live, spill))
        config = read_json(folder) | dict(extra) | {"dtype": str(rest).removeprefix("torch.")}
        if plan is not None:
            (folder / "config.json").unlink()  # what is there meanwhile is not yet a model
            encode_folder(folder, plan.coded, rest)
            config["quantization_config"] = layout_settings(plan.high)
        write_json(folder / "config.json", config)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "Hugging Face folder cannot be written",
            got=str(error),
            need="space in a writable folder",
            try_="free space or choose another folder",
            where=str(folder),
        ) from error


def _state_to_store(
    net: Any,
    dtype: torch.dtype,
    live: Callable[[str, Tensor], Tensor] | None,
    spill: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Collect the tensors to save of a Hugging Face model by name, tied ones as one; tensors from `live` wait on the
    disk."""
    stored: dict[int, Tensor] = {}
    state = net.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) not in stored:
            value = (tensor if live is None else live(f"net.{name}", tensor)).detach()
            value = value.to(dtype) if value.is_floating_point() else value
            stored[id(tensor)] = value if live is None else spill(value)
    return {name: stored[id(tensor)] for name, tensor in state.items()}
