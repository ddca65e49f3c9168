"""FP8 weights in model folders: codes and scales found, checked by their headers, read by block rows, written.

The layout is that of DeepSeek-V3 (`formats.fp8_layout`). A weight is never whole in FP32 beside its target, a model
never twice in memory. All that is wrong with names, shapes and dtypes is reported at once, before a byte is copied;
codes that are NaN are found while reading.

Legend: N output features  K input features; grid [GN, GK] = blocks down and across.
"""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tilewright.core.errors import CheckpointError, Problem
from tilewright.formats.fp8_layout import (
    SCALE_SUFFIX,
    from_stored,
    has_nan,
    layout_problems,
    layout_tile,
    to_stored,
)
from tilewright.formats.scaling import BLOCK_TILE, Tile, scale_values
from tilewright.formats.tiled import TiledTensor
from tilewright.models.folder.json_file import read_json, write_json
from tilewright.models.folder.safetensors import INDEX, SINGLE, StoredTensor, open_file, scan_folder, summary

_log = logging.getLogger(__name__)
_CODES = "F8_E4M3"
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_OTHER_FP8 = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SLICE_BYTES = 8 * 2**20
"""Codes decoded at a time; in FP32, with what decoding needs, some eight times that."""


@dataclass(frozen=True)
class StoredWeight:
    """The places of an FP8 weight's codes and scales in its files, and the block that one scale belongs to."""

    name: str
    qdata: StoredTensor
    scale: StoredTensor
    tile: Tile

    @property
    def scale_name(self) -> str:
        """Name of the scales of an FP8 weight in a folder."""
        return self.name + SCALE_SUFFIX


def find_weights(folder: Path | str, stored: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
    """The FP8 weights of a folder by name; empty where it has none. Headers only.

    Raises:
        CheckpointError: weights without scales, scales without weights, wrong shapes or dtypes, a layout that is not
            ours; all of them at once.
    """
    scales = {name for name in stored if name.endswith(SCALE_SUFFIX)}
    coded = {name: tensor for name, tensor in stored.items() if tensor.dtype == _CODES}
    other = [name for name, tensor in stored.items() if tensor.dtype in _OTHER_FP8]
    if not (scales or coded or other):
        return {}
    settings = read_json(folder).get("quantization_config")
    if not isinstance(settings, Mapping) or layout_problems(settings):
        raise CheckpointError(
            "FP8 weights whose scales config.json does not describe",
            got=", ".join(layout_problems(settings)) if isinstance(settings, Mapping) else "no quantization_config",
            need='quant_method "fp8", fmt "e4m3", a weight_block_size of two numbers, activation_scheme "dynamic"',
            try_="copy config.json again; other FP8 layouts are not read",
            where=str(Path(folder) / "config.json"),
        )
    tile = layout_tile(settings)
    problems = [*_other_formats(stored, other), *_orphans(stored, scales)]
    problems += [p for name, tensor in coded.items() if (p := _scale_problem(name, tensor, stored, tile)) is not None]
    if problems:
        raise CheckpointError.from_problems(problems)
    return {name: StoredWeight(name, tensor, stored[name + SCALE_SUFFIX], tile) for name, tensor in coded.items()}


def _other_formats(stored: Mapping[str, StoredTensor], names: list[str]) -> Iterator[Problem]:
    for name in names:
        yield Problem(
            "Unsupported 8-bit format of a weight",
            got=f"{name} in {stored[name].dtype}",
            need=f"{_CODES} (E4M3)",
            try_="a folder in the layout of DeepSeek-V3, or one in BF16",
            where=str(stored[name].file),
        )


def _orphans(stored: Mapping[str, StoredTensor], scales: set[str]) -> Iterator[Problem]:
    for name in sorted(scales):
        weight = stored.get(name.removesuffix(SCALE_SUFFIX))
        if weight is None or (weight.dtype != _CODES and weight.dtype not in _OTHER_FP8):
            yield Problem(
                "Scale without its FP8 weight",
                got=f"{name}, and " + ("no such weight" if weight is None else f"a weight in {weight.dtype}"),
                need=f"{name.removesuffix(SCALE_SUFFIX)} in {_CODES}",
                try_="copy the folder again, index and files from the same place",
                where=str(stored[name].file),
            )


def _scale_problem(name: str, qdata: StoredTensor, stored: Mapping[str, StoredTensor], tile: Tile) -> Problem | None:
    """Explain why the scale of an FP8 weight cannot be used; None if it can."""
    scale = stored.get(name + SCALE_SUFFIX)
    if len(qdata.shape) != 2:
        return Problem(
            "FP8 weight is not a matrix",
            got=f"{name} {list(qdata.shape)}",
            need="[out features, in features]; experts one by one",
            try_="a folder in the layout of DeepSeek-V3",
            where=str(qdata.file),
        )
    grid = tile.grid((qdata.shape[0], qdata.shape[1]))
    need = f"{name}{SCALE_SUFFIX} {list(grid)}, a scale for each {tile} block of {list(qdata.shape)}"
    if scale is None:
        what, got, where = "an FP8 weight has no scale.", f"{name} alone", qdata.file
    elif scale.shape != grid:
        what, got = "the scale of an FP8 weight has the wrong shape.", f"{name}{SCALE_SUFFIX} {list(scale.shape)}"
        where = scale.file
    elif scale.dtype not in _SCALES:
        what, got = "the scale of an FP8 weight has the wrong dtype.", f"{name}{SCALE_SUFFIX} in {scale.dtype}"
        need, where = f"one of {', '.join(_SCALES)}", scale.file
    else:
        return None
    return Problem(what, got, need, "copy the folder again, index and files from the same place", str(where))


# ---- reading ----


def read_scale(weight: StoredWeight) -> Tensor:
    """The scales of an FP8 weight, FP32 [GN, GK].

    Raises:
        CheckpointError: a scale is infinite, NaN or negative.
    """
    with open_file(weight.scale.file) as reader:
        scale = scale_values(reader.get_tensor(weight.scale_name))
    sound = torch.isfinite(scale) & (scale >= 0)
    if not bool(sound.all()):
        raise CheckpointError(
            "Scales of an FP8 weight are not finite numbers",
            got=f"{int((~sound).sum())} of {scale.numel()} in {weight.scale_name} infinite, NaN or negative",
            need="finite scales, none below zero",
            try_="copy the file again; if it is whole, the weights were broken before they were written",
            where=str(weight.scale.file),
        )
    return scale


def read_block_rows(
    weight: StoredWeight, first_row: int = 0, num_rows: int | None = None
) -> Iterator[tuple[int, TiledTensor]]:
    """Read an FP8 weight top to bottom: (first row, matrix of these rows), in whole block rows of some megabytes.

    Args:
        weight: what to read.
        first_row: asked for; what is given begins with the block row that it is in.
        num_rows: from there; None reads all that is left.

    Raises:
        CheckpointError: a code is NaN.
    """
    scale = read_scale(weight)
    (height, width), step = weight.qdata.shape, weight.tile.rows
    last = height if num_rows is None else first_row + num_rows
    rows = max(1, _SLICE_BYTES // max(1, width * step)) * step
    with open_file(weight.qdata.file) as reader:
        view = reader.get_slice(weight.name)
        for start in range(first_row // step * step, last, rows):
            stop = min(start + rows, last)
            qdata = view[start:stop]
            if has_nan(qdata):
                raise _nan_error(weight, qdata, start)
            yield start, from_stored(qdata, scale[start // step : -(-stop // step)], weight.tile)


def _nan_error(weight: StoredWeight, qdata: Tensor, start: int) -> CheckpointError:
    row = next(i for i in range(len(qdata)) if has_nan(qdata[i]))
    return CheckpointError(
        "FP8 weight holds NaN",
        got=f"{weight.name}, first in row {start + row}",
        need="codes of numbers",
        try_="copy the file again; if it is whole, the weights were broken before they were written",
        where=str(weight.qdata.file),
    )


@torch.no_grad()
def copy_weight(
    weight: StoredWeight, target_NK: Tensor, target_scale: Tensor | None = None, *, first_row: int = 0
) -> None:
    """Copy a stored FP8 weight, or some rows, into a tensor: its values, or codes and scales as they are.

    Args:
        weight: what to read.
        target_NK: of a floating-point dtype; float8_e4m3fn where there is a `target_scale`.
        target_scale: FP32 [GN, GK], takes the scales. The weight is whole then.
        first_row: of the weight, for the target's first row.

    Raises:
        CheckpointError: NaN among codes or scales, or a target of codes and blocks that are not 128x128.
    """
    if target_scale is not None and weight.tile != BLOCK_TILE:
        raise CheckpointError(
            "FP8 block size is not supported without decoding",
            got=f"{weight.name} in blocks of {weight.tile}",
            need=f"blocks of {BLOCK_TILE}",
            try_='base = "keep", or a model without adapters, which decode the weights',
            where=str(weight.qdata.file),
        )
    for start, tiled in read_block_rows(weight, first_row, len(target_NK)):
        rows = slice(start, start + len(tiled.qdata))
        if target_scale is None:
            begin = max(start, first_row)  # the first block row may begin before it
            target_NK[begin - first_row : rows.stop - first_row].copy_(tiled.dequantize()[begin - start :])
        else:
            target_NK[rows].view(torch.uint8).copy_(tiled.qdata)
            first = start // weight.tile.rows
            target_scale[first : first + len(tiled.scale_inv)].copy_(tiled.scale_inv)


class LazyWeight:
    """A stored weight that is decoded when it is indexed with `...`, as transformers reads what it loads.

    Its first error is kept in `faults`, because transformers turns errors while loading into its own.
    """

    def __init__(self, weight: StoredWeight, faults: list[CheckpointError]):
        self.weight, self.faults = weight, faults

    def get_shape(self) -> list[int]:
        """Shape of a lazily read FP8 weight, [N, K]."""
        return list(self.weight.qdata.shape)

    def get_dtype(self) -> str:
        """The dtype of the values of a lazily read FP8 weight."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        values_NK = torch.empty(self.weight.qdata.shape)
        try:
            copy_weight(self.weight, values_NK)
        except CheckpointError as error:
            self.faults.append(error)
            raise
        return values_NK[index]


# ---- writing ----


def stored_bytes(shape: tuple[int, int]) -> int:
    """Bytes of an FP8 weight's codes and scales."""
    return math.prod(shape) + 4 * math.prod(BLOCK_TILE.grid(shape))


def encode_weight(name: str, weight_NK: Tensor) -> dict[str, Tensor]:
    """Encode a weight in FP8: its codes and scales under their names in a file."""
    qdata, scale_inv = to_stored(weight_NK)
    return {name: qdata, name + SCALE_SUFFIX: scale_inv}


def kept_names(names: Iterable[str], keep: Iterable[str]) -> set[str]:
    """The module names that a glob of `keep` matches, which FP8 leaves out."""
    patterns = tuple(keep)
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def warn_of_ragged(shapes: Mapping[str, tuple[int, int]]) -> None:
    """Warn of FP8 weights with ragged tiles that transformers (seen in 5.23) cannot decode on a machine without a GPU.

    It takes the block from shape / grid, which is right only where the blocks have one size.
    """
    ragged = [name for name, shape in shapes.items() if not has_even_blocks(shape)]
    if ragged:
        _log.warning(
            "transformers without a GPU misreads FP8 weights whose size is above 128 and no multiple of it: %s. "
            "For it, keep these layers in BF16.",
            summary(ragged),
        )


def has_even_blocks(shape: tuple[int, int]) -> bool:
    """True if the blocks of an FP8 weight are even, all of one size: a single one, or full ones."""
    sides = zip(shape, BLOCK_TILE.grid(shape), (BLOCK_TILE.rows, BLOCK_TILE.cols), strict=True)
    return all(blocks == 1 or size == blocks * full for size, blocks, full in sides)


@torch.no_grad()
def encode_folder(folder: Path, coded: Collection[str], rest: torch.dtype) -> None:
    """Rewrite a folder that transformers wrote, file by file, with some matrices in FP8.

    Args:
        folder: holds safetensors, and an index where there are several.
        coded: names of the matrices to store in FP8, see `fp8_names.plan_fp8`.
        rest: dtype of all other floating-point tensors.
    """
    weight_map, num_bytes = {}, 0
    files = sorted(folder.glob("model*.safetensors"))
    for file in files:
        tensors: dict[str, Tensor] = {}
        with open_file(file) as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                tensor = reader.get_tensor(name)
                if name in coded:
                    tensors |= encode_weight(name, tensor)
                else:
                    tensors[name] = tensor.to(rest) if tensor.is_floating_point() else tensor
        partial = file.with_name(file.name + ".partial")
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(file)
        weight_map |= dict.fromkeys(tensors, file.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if [file.name for file in files] != [SINGLE]:
        write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def fp8_bytes(folder: Path | str) -> tuple[int, int]:
    """Bytes of a folder's FP8 weights with their scales, and of all its safetensors files; headers only."""
    stored = scan_folder(folder)
    in_fp8 = sum(
        stored_bytes((tensor.shape[0], tensor.shape[1])) for tensor in stored.values() if tensor.dtype == _CODES
    )
    return in_fp8, sum(file.stat().st_size for file in {tensor.file for tensor in stored.values()})
