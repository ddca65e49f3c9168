"""Weights of Llama, Mistral and DeepSeek-V3 folders: (sharded) safetensors to and from a `decoder.Decoder`.

Reading copies slice by slice into the parameters that exist already, so a model is never in memory twice; everything
that does not fit is reported at once, before a byte is copied. Writing puts config.json last: a folder without it is
not yet a model. transformers reads what is written here, and the other way round. Weights in FP8 (DeepSeek-V3's own
folders) are decoded on the way, and encoded where the dtype to write is float8_e4m3fn: see `fp8_weights`. The shape is
`hf_config`'s matter.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from tilewright.core.errors import CheckpointError
from tilewright.core.units import format_bytes
from tilewright.formats.fp8_layout import CODE_DTYPE, SCALE_SUFFIX, layout_settings, to_stored
from tilewright.models.base.protocols import ALL_WHOLE, InitialValues, Model
from tilewright.models.decoder.hf_config import read_config, to_hf_config, to_own_config
from tilewright.models.distill.hidden import NAME as HIDDEN_LOSS
from tilewright.models.folder.fp8_weights import (
    StoredWeight,
    copy_weight,
    encode_weight,
    find_weights,
    kept_names,
    stored_bytes,
    warn_of_ragged,
)
from tilewright.models.folder.json_file import read_json, write_json
from tilewright.models.folder.safetensors import (
    INDEX,
    SINGLE,
    StoredTensor,
    check_no_adapters,
    mismatch_error,
    open_file,
    scan_folder,
)
from tilewright.models.folder.spill import spilled

__all__ = [
    "copy_stored",
    "decoder_weights",
    "load_weights",
    "read_config",
    "save_decoder",
    "scan_folder",
    "write_shards",
]

SLICE_BYTES = 64 * 2**20
SHARD_BYTES = 4 * 2**30
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Stored by old writers, computed from the shape by everybody."""


def load_weights(model: Model, folder: Path | str, *, absent: Collection[str] = ()) -> None:
    """Load weights of a Hugging Face folder: copy them into the decoder's parameters and buffers, cast to their dtypes.

    FP8 weights are decoded, exactly in FP32 (and in BF16 where their scales are powers of two). A weight that the model
    keeps in FP8 takes codes and scales as they are, or is encoded.

    Args:
        model: a decoder, in memory.
        folder: of the same shape.
        absent: names of the model's own that no folder holds (adapters); left as they are.

    Raises:
        CheckpointError: names, shapes or scales do not match (all of them are listed), a file is missing or corrupt, or
            FP8 weights hold NaN. The model is untouched where names, shapes or scales do not match.
    """
    values = decoder_weights(model, folder, absent=absent)
    values({name: tensor for name, tensor in _stored_state(model).items() if name not in absent})


def decoder_weights(model: Model, folder: Path | str, *, absent: Collection[str] = ()) -> InitialValues:
    """A function that copies weights of a Hugging Face folder into tensors under the decoder's names; see
    `load_weights`.

    Names and shapes are checked now, by the files' headers. Bytes are read when the copier is called, which raises
    CheckpointError where a file is corrupt or FP8 weights hold NaN.

    Args:
        model: a decoder, perhaps on the meta device; only names, shapes and dtypes are read.
        folder: of the same shape.
        absent: names of the model's own that no folder holds.
    """
    stored = scan_folder(folder)
    coded = find_weights(folder, stored)
    own = _stored_state(model)
    targets = {name: t for name, t in own.items() if name not in absent and not _is_scale_of_codes(name, own)}
    read = stored.keys() - {weight.scale_name for weight in coded.values()}
    extra = {name for name in read if name not in targets and not _may_ignore(name, model, folder)}
    wrong = {
        name: f"{list(stored[name].shape)} in the folder, {list(tensor.shape)} in the model"
        for name, tensor in targets.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    }
    missing = targets.keys() - stored.keys()
    if missing or extra or wrong:
        raise mismatch_error(folder, missing, extra, wrong)
    return functools.partial(copy_stored, stored, coded)


@torch.no_grad()
def copy_stored(
    stored: Mapping[str, StoredTensor],
    coded: Mapping[str, StoredWeight],
    tensors: Mapping[str, Tensor],
    first_rows: Mapping[str, int] = ALL_WHOLE,
) -> None:
    """Copy stored weights of a Hugging Face folder into the tensors of the same names, decoding FP8 where the tensor is
    not FP8 itself.

    Of a tensor that comes in part only its rows are read; of an FP8 weight whole rows of blocks.

    Args:
        stored, coded: all tensors of a folder, and those in FP8.
        tensors, first_rows: see `InitialValues`. One that is FP8 itself is whole.

    Raises:
        CheckpointError: a file is corrupt, or FP8 weights hold NaN.
    """
    scales = {name: tensor for name, tensor in tensors.items() if _is_scale_of_codes(name, tensors)}
    if any(name.removesuffix(SCALE_SUFFIX) in first_rows for name in scales):
        raise AssertionError("weights that stay in FP8 are not read in part")
    targets = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name in targets.keys() & coded.keys():
        copy_weight(coded[name], targets[name], scales.get(name + SCALE_SUFFIX), first_row=first_rows.get(name, 0))
    _copy_files({name: targets[name] for name in targets if name not in coded}, stored, scales, first_rows)


def _is_scale_of_codes(name: str, tensors: Mapping[str, Tensor]) -> bool:
    qdata = tensors.get(name.removesuffix(SCALE_SUFFIX)) if name.endswith(SCALE_SUFFIX) else None
    return qdata is not None and qdata.dtype == CODE_DTYPE


def _copy_files(
    targets: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    scales: Mapping[str, Tensor],
    first_rows: Mapping[str, int],
) -> None:
    """Copy the tensors of a Hugging Face folder that are not in FP8, opening each file once."""
    by_file: dict[Path, list[str]] = {}
    for name in targets:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        with open_file(file) as reader:
            for name in names:
                if name + SCALE_SUFFIX in scales:
                    qdata, scale_inv = to_stored(reader.get_tensor(name))
                    targets[name].view(torch.uint8).copy_(qdata.view(torch.uint8))
                    scales[name + SCALE_SUFFIX].copy_(scale_inv)
                else:
                    _copy_slices(reader, name, targets[name], first_rows.get(name, 0))


def save_decoder(
    model: Model,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    keep: Collection[str] = (),
    live: Callable[[str, Tensor], Tensor] | None = None,
    own_layout: bool = False,
) -> None:
    """Save a decoder's weights as a Hugging Face folder: config.json and safetensors; see `protocols.Model.save_hf`.

    Args:
        model: a decoder.
        dtype: float8_e4m3fn writes the layout of DeepSeek-V3: linear layers in FP8 with a power-of-two scale for each
            128x128 block, everything else in BF16. Weights that came from such a folder are written without loss.
        shard_bytes: a file holds at most this much, or one tensor.
        keep: globs on the names of linear layers that stay BF16 in a folder of FP8.
        own_layout: write what tilewright alone reads, for shapes that no other layout holds (`to_own_config`).

    Raises:
        CheckpointError: no Hugging Face layout holds the shape, the model has parts of its own (adapters), or the
            folder cannot be written.
    """
    # 1. The layout: which matrices get FP8 codes, and the dtype of the rest.
    state = _stored_state(model)
    dtype = dtype or state["model.embed_tokens.weight"].dtype
    coded, high = _split_linears(model, keep) if dtype == CODE_DTYPE else (set(), set())
    rest = torch.bfloat16 if dtype == CODE_DTYPE else dtype
    layout = to_own_config if own_layout else to_hf_config
    config = layout(model.config, str(rest).removeprefix("torch.")) | dict(extra or {})
    check_no_adapters(state, folder)
    if coded:
        config["quantization_config"] = layout_settings(sorted(high))
        warn_of_ragged({name: _matrix(state[name]) for name in coded})
    # 2. config.json goes first and comes last: a folder that is half written is no model.
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        write_shards(state, folder, rest, shard_bytes, coded, live)
        write_json(folder / "config.json", config)
    except (OSError, SafetensorError) as error:
        for partial in folder.glob("*.partial"):
            partial.unlink()
        raise CheckpointError(
            "Hugging Face folder cannot be written",
            got=str(error),
            need=f"{format_bytes(sum(_bytes(n, t, rest, coded) for n, t in state.items()))} in a writable folder",
            try_="free space or choose another folder; what is there has no config.json and is not read as a model",
            where=str(folder),
        ) from error


def write_shards(
    state: Mapping[str, Tensor],
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    coded: Collection[str] = (),
    live: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Write Hugging Face weights: tensors as one safetensors file, or several with an index. One shard at a time is
    copied or cast; of what comes from `live`, one tensor at a time, and the others wait on the disk.

    Routing biases stay FP32, as DeepSeek-V3 keeps them. The weights in `coded` are written in FP8.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in state.items():
        size = _bytes(name, tensor, dtype, coded)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    total = len(shards)
    files = [SINGLE] if total == 1 else [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
    weight_map = {}
    for file, names in zip(files, shards, strict=True):
        tensors: dict[str, Tensor] = {}
        partial = folder / f"{file}.partial"
        with spilled(folder) as spill:
            for name in names:
                value = state[name].detach() if live is None else live(name, state[name]).detach()
                stored = _as_stored(name, value, dtype, coded)
                tensors |= stored if live is None else {key: spill(tensor) for key, tensor in stored.items()}
            save_file(tensors, partial, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            del tensors  # before the next shard is copied
        partial.replace(folder / file)
    for stale in {p.name for p in folder.glob("model*.safetensors*")} - {*files, INDEX}:
        (folder / stale).unlink()
    (folder / INDEX).unlink(missing_ok=True)
    if total > 1:
        num_bytes = sum(_bytes(n, t, dtype, coded) for n, t in state.items())
        write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def _as_stored(name: str, tensor: Tensor, dtype: torch.dtype, coded: Collection[str]) -> dict[str, Tensor]:
    if name in coded:
        return encode_weight(name, tensor.cpu())
    return {name: tensor.to("cpu", _stored_dtype(name, dtype)).contiguous()}


def _bytes(name: str, tensor: Tensor, dtype: torch.dtype, coded: Collection[str]) -> int:
    return stored_bytes(_matrix(tensor)) if name in coded else tensor.numel() * _stored_dtype(name, dtype).itemsize


def _matrix(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[0], tensor.shape[1]


def _split_linears(model: nn.Module, keep: Collection[str]) -> tuple[set[str], set[str]]:
    """Divide the decoder's linear layers into those written in FP8, and those that are not: head and `keep`."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    high = kept_names(linears, keep) | {name for name in linears if not name.startswith("model.layers.")}
    return {f"{name}.weight" for name in linears - high}, high


def _stored_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a Hugging Face folder of the decoder stores: parameters and persistent buffers under their
    stored names, tied ones by their first name only. Projections to a teacher's hidden values belong to the run, not to
    the model."""
    seen: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    own = {name: tensor for name, tensor in state.items() if not name.startswith(f"{HIDDEN_LOSS}.")}
    return {name: tensor for name, tensor in own.items() if seen.setdefault(id(tensor), name) == name}


def _may_ignore(name: str, model: Model, folder: Path | str) -> bool:
    """True if a Hugging Face folder's weight that the decoder has no place for cannot change its logits."""
    if name == "lm_head.weight" and model.config.tie_embeddings:
        return True
    if _HARMLESS.search(name):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None or int(layer[1]) < model.config.num_layers:
        return False
    # DeepSeek-V3 stores its multi-token-prediction modules as further layers.
    return int(layer[1]) < model.config.num_layers + (read_json(folder).get("num_nextn_predict_layers") or 0)


def _copy_slices(reader: Any, name: str, target: Tensor, first_row: int) -> None:
    """Copy slices of a Hugging Face weight, from a row on, into `target`, at most SLICE_BYTES of it at a time."""
    if target.dim() == 0:
        target.copy_(reader.get_tensor(name))
        return
    view = reader.get_slice(name)
    rows = max(1, SLICE_BYTES // max(1, target[0].numel() * target.element_size())) if len(target) else 1
    for start in range(0, len(target), rows):
        stop = min(start + rows, len(target))
        target[start:stop].copy_(view[first_row + start : first_row + stop])


def _stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype
