"""Weights of Llama and DeepSeek-V3 folders: (sharded) safetensors to and from a `Decoder`.

Reading copies slice by slice into the parameters that exist already, so a model is never in memory twice; everything
that does not fit is reported at once, before a byte is copied. Writing puts config.json last: a folder without it is
not yet a model. transformers reads what is written here, and the other way round. The shape is `hf_config`'s matter.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tilewright.core.errors import CheckpointError
from tilewright.core.units import format_bytes
from tilewright.models.decoder import Decoder
from tilewright.models.hf_config import read_config, read_json, to_hf_config, write_json
from tilewright.ops.kernels import Kernels

__all__ = ["load_decoder", "load_weights", "read_config", "save_decoder", "scan_folder", "write_shards"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SLICE_BYTES = 64 * 2**20
SHARD_BYTES = 4 * 2**30
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Stored by old writers, computed from the shape by everybody."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what it is, read from a file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_decoder(folder: Path | str, kernels: Kernels | None = None, device: torch.device | str = "cpu") -> Decoder:
    """The model in a folder of Llama or DeepSeek-V3 layout, parameters in FP32.

    Raises:
        CheckpointError: the folder is not of these layouts, is incomplete, or does not match its own config.json.
    """
    with torch.device("meta"):
        model = Decoder(read_config(folder), kernels)
    model.to_empty(device=device)
    model.tie_weights()
    load_weights(model, folder)
    return model


@torch.no_grad()
def load_weights(model: Decoder, folder: Path | str) -> None:
    """Copy a folder's weights into the model's parameters and buffers, cast to their dtypes.

    Raises:
        CheckpointError: names or shapes do not match (all of them are listed), or a file is missing or torn. The
            model is untouched where names or shapes do not match.
    """
    stored = scan_folder(folder)
    targets = _stored_state(model)
    extra = {name for name in stored if name not in targets and not _may_ignore(name, model, folder)}
    wrong = {
        name: f"{list(stored[name].shape)} in the folder, {list(tensor.shape)} in the model"
        for name, tensor in targets.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    }
    missing = targets.keys() - stored.keys()
    if missing or extra or wrong:
        raise mismatch_error(folder, missing, extra, wrong)
    by_file: dict[Path, list[str]] = {}
    for name in targets:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        with _open(file) as reader:
            for name in names:
                _copy_slices(reader, name, targets[name])


def scan_folder(folder: Path | str) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files, by name; headers only.

    Raises:
        CheckpointError: no safetensors, a file of the index is missing, or a file is torn.
    """
    folder = Path(folder)
    if (folder / INDEX).is_file():
        weight_map = read_json(folder, INDEX).get("weight_map", {})
        files = sorted({folder / name for name in weight_map.values()})
        absent = [file.name for file in files if not file.is_file()]
    else:
        weight_map, files = None, [folder / SINGLE]
        absent = [] if files[0].is_file() else [SINGLE]
    if absent:
        raise CheckpointError(
            "weights are missing from the model folder.",
            got="no " + ", ".join(absent),
            need=f"{SINGLE}, or {INDEX} with every file that it names",
            try_="copy the missing files; other formats than safetensors are not read",
            where=str(folder),
        )
    stored = {}
    for file in files:
        with _open(file) as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                view = reader.get_slice(name)
                stored[name] = StoredTensor(file, tuple(view.get_shape()), view.get_dtype())
    lost = sorted(set(weight_map or ()) - stored.keys())
    if lost:
        raise CheckpointError(
            f"{INDEX} names tensors that its files do not hold.",
            got=_summary(lost),
            need="an index that matches its files",
            try_="copy the folder again",
            where=str(folder),
        )
    return stored


def save_decoder(
    model: Decoder,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json and safetensors; see `contract.Model.save_hf`.

    Args:
        shard_bytes: a file holds at most this much, or one tensor.

    Raises:
        CheckpointError: no Hugging Face layout holds the shape, or the folder cannot be written.
    """
    state = _stored_state(model)
    dtype = dtype or model.model.embed_tokens.weight.dtype
    config = to_hf_config(model.config, str(dtype).removeprefix("torch.")) | dict(extra or {})
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        write_shards(state, folder, dtype, shard_bytes)
        write_json(folder / "config.json", config)
    except (OSError, SafetensorError) as error:
        for partial in folder.glob("*.partial"):
            partial.unlink()
        raise CheckpointError(
            "the Hugging Face folder cannot be written.",
            got=str(error),
            need=f"{format_bytes(sum(t.numel() for t in state.values()) * dtype.itemsize)} in a writable folder",
            try_="free space or choose another folder; what is there has no config.json and is not read as a model",
            where=str(folder),
        ) from error


def write_shards(state: Mapping[str, Tensor], folder: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """Write tensors as one safetensors file, or several with an index. One shard at a time is copied or cast.

    Routing biases stay FP32, as DeepSeek-V3 keeps them.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in state.items():
        size = tensor.numel() * _stored_dtype(name, dtype).itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    total = len(shards)
    files = [SINGLE] if total == 1 else [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
    weight_map = {}
    for file, names in zip(files, shards, strict=True):
        tensors = {n: state[n].detach().to("cpu", _stored_dtype(n, dtype)).contiguous() for n in names}
        partial = folder / f"{file}.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        del tensors  # before the next shard is copied
        partial.replace(folder / file)
        weight_map |= dict.fromkeys(names, file)
    for stale in {p.name for p in folder.glob("model*.safetensors*")} - {*files, INDEX}:
        (folder / stale).unlink()
    (folder / INDEX).unlink(missing_ok=True)
    if total > 1:
        num_bytes = sum(t.numel() * _stored_dtype(n, dtype).itemsize for n, t in state.items())
        write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def mismatch_error(
    folder: Path | str, missing: Iterable[str], extra: Iterable[str], wrong: Mapping[str, str]
) -> CheckpointError:
    """The error that lists every name that does not fit: missing, unexpected, of wrong shape."""
    missing, extra = sorted(missing), sorted(extra)
    parts = []
    if missing:
        parts.append(f"missing ({len(missing)}): {_summary(missing)}")
    if extra:
        parts.append(f"unexpected ({len(extra)}): {_summary(extra)}")
    if wrong:
        parts.append(f"wrong shape ({len(wrong)}): " + "; ".join(f"{name}: {text}" for name, text in wrong.items()))
    return CheckpointError(
        "the weights in the folder are not those of this model.",
        got="\n".join(parts),
        need="every tensor of the model, in its shape, and no other",
        try_='a folder written for this shape, or model.weights = "random"',
        where=str(folder),
    )


def _stored_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under their stored names; of tied ones the first name only."""
    seen: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if seen.setdefault(id(tensor), name) == name}


def _may_ignore(name: str, model: Decoder, folder: Path | str) -> bool:
    """Whether a stored tensor that the model has no place for cannot change its logits."""
    if name == "lm_head.weight" and model.config.tie_embeddings:
        return True
    if _HARMLESS.search(name):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None or int(layer[1]) < model.config.num_layers:
        return False
    # DeepSeek-V3 stores its multi-token-prediction modules as further layers.
    return int(layer[1]) < model.config.num_layers + (read_json(folder).get("num_nextn_predict_layers") or 0)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file.name} cannot be read.",
            got=str(error),
            need="a whole safetensors file",
            try_="copy the file again",
            where=str(file),
        ) from error


def _copy_slices(reader: Any, name: str, target: Tensor) -> None:
    """Copy a stored tensor into `target`, at most SLICE_BYTES of it at a time."""
    if target.dim() == 0:
        target.copy_(reader.get_tensor(name))
        return
    view = reader.get_slice(name)
    rows = max(1, SLICE_BYTES // max(1, target[0].numel() * target.element_size())) if len(target) else 1
    for start in range(0, len(target), rows):
        target[start : start + rows].copy_(view[start : start + rows])


def _stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def _summary(names: Iterable[str]) -> str:
    """Names, those that differ by layer or expert number folded: `model.layers.*.mlp.up_proj.weight (12)`."""
    folded: dict[str, list[str]] = {}
    for name in names:
        folded.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(name)
    return ", ".join(same[0] if len(same) == 1 else f"{key} ({len(same)})" for key, same in folded.items())
