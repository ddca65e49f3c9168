"""FP8 weights as they are in files, in the layout of DeepSeek-V3: codes, a scale per block, and what config.json says.

    weight            float8_e4m3fn [N, K]
    weight_scale_inv  FP32 [ceil(N / 128), ceil(K / 128)], value of an element = code * scale_inv of its block
    config.json       quantization_config {quant_method "fp8", fmt "e4m3", weight_block_size [128, 128],
                      activation_scheme "dynamic", modules_to_not_convert [...] in newer folders}

Tensors and settings only; folders are `models.folder.fp8_weights`'s matter. Other layouts of that name (one scale per
tensor, fixed scales for activations) are not read: `layout_problems` says so.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.formats.encode import NAN_CODE
from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import BLOCK_TILE, Tile, scale_values
from tilewright.formats.spec import E4M3
from tilewright.formats.tiled import FP8_BLOCK, TiledTensor

SCALE_SUFFIX = "_scale_inv"
"""Suffix of the name of a weight's scales."""
CODE_DTYPE = E4M3.dtype
_ONLY: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "expert_dtype": ("fp8", None),
}


def layout_problems(settings: Mapping[str, Any]) -> list[str]:
    """Compare a `quantization_config` with the stored FP8 layout: one text per key that differs; empty if none does.

    Example:
        >>> layout_problems({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"})
        ["quantization_config.activation_scheme = 'static'"]
    """
    wrong = [key for key, allowed in _ONLY.items() if settings.get(key) not in allowed]
    block = settings.get("weight_block_size")
    sizes = block if isinstance(block, (list, tuple)) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        wrong.append("weight_block_size")
    return [f"quantization_config.{key} = {settings.get(key)!r}" for key in wrong]


def layout_tile(settings: Mapping[str, Any]) -> Tile:
    """The tile of the stored FP8 layout: the block of a `quantization_config` without problems."""
    rows, cols = settings["weight_block_size"]
    return Tile(rows, cols)


def layout_settings(not_converted: Iterable[str] = ()) -> dict[str, Any]:
    """The `quantization_config` of the stored FP8 layout: weights in 128x128 blocks.

    Args:
        not_converted: linear layers that keep their 16 or 32 bit, by full name.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK_TILE.rows, BLOCK_TILE.cols],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": list(not_converted),
    }


def to_stored(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a weight to the stored FP8 layout: codes (float8_e4m3fn [N, K]) and power-of-two scales (FP32), in
    128x128 blocks. For a weight on the meta device it returns their shapes at once: a plan has hundreds of them, and
    reads nothing else.

    Exact for a weight that came from such codes and scales, though not always the same codes: where no element of a
    block uses the upper half of the format, its scale is halved and its codes are doubled.

    Example:
        >>> qdata, scale_inv = to_stored(torch.tensor([[448.0, -1.0]]))
        >>> qdata.dtype, scale_inv.tolist(), from_stored(qdata, scale_inv).dequantize().tolist()
        (torch.float8_e4m3fn, [[1.0]], [[448.0, -1.0]])
    """
    if weight_NK.is_meta:
        grid = BLOCK_TILE.grid((weight_NK.shape[0], weight_NK.shape[1]))
        return weight_NK.new_empty(weight_NK.shape, dtype=CODE_DTYPE), weight_NK.new_empty(grid, dtype=torch.float32)
    tiled = quantize(weight_NK, FP8_BLOCK)
    return tiled.qdata.contiguous().view(CODE_DTYPE), tiled.scale_inv


def from_stored(qdata_NK: Tensor, scale_inv: Tensor, tile: Tile = BLOCK_TILE) -> TiledTensor:
    """Make a matrix from codes (float8_e4m3fn, or uint8) and scales of the stored FP8 layout; nothing is copied if
    scales are FP32.

    Raises:
        ValueError: the shapes do not belong together.
    """
    qdata = qdata_NK if qdata_NK.dtype == torch.uint8 else qdata_NK.view(torch.uint8)
    return TiledTensor(qdata, scale_values(scale_inv), tile, E4M3)


def has_nan(qdata: Tensor) -> bool:
    """True if an FP8 layout has NaN: a code means it, which no valid weight is."""
    return bool(((qdata.view(torch.uint8) & NAN_CODE) == NAN_CODE).any())
