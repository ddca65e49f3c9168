"""A folder of (sharded) safetensors: what tensors it holds and where, read from headers alone; errors about them.

Nothing about models or formats: `hf_weights` and `fp8_weights` come on top.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tilewright.core.errors import CheckpointError
from tilewright.models.folder.json_file import read_json

if TYPE_CHECKING:  # names and places of tensors are found without torch
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what it is, read from a file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def scan_folder(folder: Path | str) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files, by name; headers only.

    Raises:
        CheckpointError: no safetensors, a file of the index is missing, or a file is corrupt.
    """
    folder = Path(folder)
    # 1. Files: those of the index, or the only one.
    if (folder / INDEX).is_file():
        weight_map = read_json(folder, INDEX).get("weight_map", {})
        files = sorted({folder / name for name in _file_names(folder, weight_map)})
        absent = [file.name for file in files if not file.is_file()]
    else:
        weight_map, files = None, [folder / SINGLE]
        absent = [] if files[0].is_file() else [SINGLE]
    if absent:
        raise CheckpointError(
            "Weights are missing from the model folder",
            got="no " + ", ".join(absent),
            need=f"{SINGLE}, or {INDEX} with every file that it names",
            try_="copy the missing files; other formats than safetensors are not read",
            where=str(folder),
        )
    # 2. Names, shapes and dtypes from the headers: no weight is read.
    stored = {}
    for file in files:
        with open_file(file) as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                view = reader.get_slice(name)
                stored[name] = StoredTensor(file, tuple(view.get_shape()), view.get_dtype())
    # 3. An index may be of another copy of the folder.
    lost = sorted(set(weight_map or ()) - stored.keys())
    if lost:
        raise CheckpointError(
            f"{INDEX} lists tensors that its files do not hold",
            got=summary(lost),
            need="an index that matches its files",
            try_="copy the folder again",
            where=str(folder),
        )
    return stored


def weight_files(folder: Path) -> list[str]:
    """Names of safetensors files of weights, as the index says where there is one."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    weight_map = read_json(folder, INDEX).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    return [name for name in names if Path(name).name == name and name.endswith(".safetensors")] or [SINGLE]


def _file_names(folder: Path, weight_map: Any) -> set[str]:
    """The files of a safetensors index.

    Raises:
        CheckpointError: it is no table of names, or names something else than files of its own folder.
    """
    names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else {str(weight_map)}
    wrong = sorted(name for name in names if Path(name).name != name or not name.endswith(".safetensors"))
    if wrong:
        raise CheckpointError(
            f"{INDEX} lists files that are no safetensors of its folder",
            got=summary(wrong),
            need='a "weight_map" from the names of tensors to files beside it',
            try_="copy the folder again",
            where=str(folder),
        )
    return names


def mismatch_error(
    folder: Path | str, missing: Iterable[str], extra: Iterable[str], wrong: Mapping[str, str]
) -> CheckpointError:
    """The error on safetensors that lists every name that does not fit: missing, unexpected, of wrong shape."""
    missing, extra = sorted(missing), sorted(extra)
    parts = []
    if missing:
        parts.append(f"missing ({len(missing)}): {summary(missing)}")
    if extra:
        parts.append(f"unexpected ({len(extra)}): {summary(extra)}")
    if wrong:
        parts.append(f"wrong shape ({len(wrong)}): " + "; ".join(f"{name}: {text}" for name, text in wrong.items()))
    return CheckpointError(
        "Weights in the folder belong to another model",
        got="\n".join(parts),
        need="every tensor of the model, in its shape, and no other",
        try_='a folder written for this shape, or model.weights = "random"',
        where=str(folder),
    )


def check_no_adapters(state: "Mapping[str, Tensor]", folder: Path | str) -> None:
    """Check before safetensors are written: raise where a model holds adapters or frozen FP8 weights, which a folder of
    whole weights has no names for.

    Raises:
        CheckpointError: it does.
    """
    own = [name for name, tensor in state.items() if name.endswith((".lora_A", ".lora_B")) or tensor.itemsize == 1]
    if own:
        raise CheckpointError(
            "Adapters in the model, none in the folder",
            got=summary(own),
            need="merged weights",
            try_="tilewright.precision.lora.lora.merge_lora(model) first, or for the adapters alone "
            "tilewright.precision.lora.peft_io.save_adapter(model, folder)",
            where=str(folder),
        )


def open_file(file: Path) -> Any:
    """Open a safetensors file for lazy reading.

    Raises:
        CheckpointError: the file is corrupt or missing.
    """
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file.name} cannot be read",
            got=str(error),
            need="a whole safetensors file",
            try_="copy the file again",
            where=str(file),
        ) from error


def summary(names: Iterable[str]) -> str:
    """A summary of names in safetensors, those that differ by layer or expert number folded:
    `model.layers.*.mlp.up_proj.weight (12)`."""
    folded: dict[str, list[str]] = {}
    for name in names:
        folded.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(name)
    return ", ".join(same[0] if len(same) == 1 else f"{key} ({len(same)})" for key, same in folded.items())
