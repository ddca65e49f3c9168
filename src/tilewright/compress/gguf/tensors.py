"""A model's weights under llama.cpp's names, in its order of rows and its formats.

Legend: H heads  D head width  R rows  C columns.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from tilewright.compress.gguf.architecture import GGUFShape
from tilewright.formats.integer import IntegerTensor

BLOCK = 32
"""Elements with one scale, in Q8_0 and Q4_0; a row must hold whole blocks."""


def named_tensors(
    weights: Mapping[str, Tensor], shape: GGUFShape, codes: Mapping[str, IntegerTensor]
) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """The tensors of a GGUF file: (name in the file, FP32 array, blocks of Q4_0 or None) of each weight, one at a time.

    Args:
        weights: under Hugging Face's names.
        shape: of the model.
        codes: of some of them, in four bits.
    """
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == shape.arch)
    names = gguf.get_tensor_name_map(arch, shape.num_layers)
    for name, tensor in weights.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise AssertionError(f"llama.cpp's {shape.arch} has no tensor {name}")
        array, found = tensor.float().cpu().numpy(), codes.get(name)
        pieces = [array] if found is None else [array, found.codes.numpy(), found.scale.numpy()]
        if shape.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            pieces = [to_neighbours(piece, shape.head_dim) for piece in pieces]
        yield theirs, np.ascontiguousarray(pieces[0]), None if found is None else q4_0_blocks(*pieces[1:])


def q4_0_blocks(codes_RC: np.ndarray, scale_RG: np.ndarray) -> np.ndarray:
    """Convert a tensor's codes to GGUF blocks of Q4_0: rows [R, C / 32 * 18] uint8. A block is an FP16 scale, then 16
    bytes of two codes each, +8, i and i + 16.

    Args:
        codes_RC: int8, -8..7.
        scale_RG: numbers of FP16, one for each 32 columns.

    Example:
        >>> blocks = q4_0_blocks(np.arange(32, dtype=np.int8)[None] % 16 - 8, np.array([[0.5]], np.float32))
        >>> blocks[0, :4].tolist()  # 0.5 is 0x3800; codes 0 and 16 are both -8, 1 and 17 both -7
        [0, 56, 0, 17]
    """
    rows, groups = scale_RG.shape
    nibbles = (codes_RC.reshape(rows, groups, 2, BLOCK // 2) + 8).astype(np.uint8)
    packed = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
    scale = scale_RG.astype("<f2")[:, :, None].view(np.uint8)
    return np.ascontiguousarray(np.concatenate((scale, packed), axis=2).reshape(rows, groups * (2 + BLOCK // 2)))


def to_neighbours(weight_RC: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a GGUF tensor, a projection to rotary heads, reordered so that pairs (i, i + D/2) become (2i, 2i + 1).

    Queries and keys are reordered alike, so their products are the same.

    Example:
        >>> to_neighbours(np.arange(4)[:, None], 4)[:, 0].tolist()
        [0, 2, 1, 3]
    """
    halves = weight_RC.reshape(-1, 2, head_dim // 2, weight_RC.shape[1])
    return halves.swapaxes(1, 2).reshape(weight_RC.shape)


def stored_format(array: np.ndarray, asked: str) -> str:
    """The format of one tensor in a GGUF file of `asked` ("f16", "q8_0", "q4_0"): vectors stay FP32, and a matrix whose
    rows are no whole blocks is F16."""
    if array.ndim == 1:
        return "f32"
    return asked if asked == "f16" or array.shape[-1] % BLOCK == 0 else "f16"


def stored_values(values: Tensor, asked: str) -> Tensor:
    """Values of a tensor as a GGUF file of `asked` returns it, FP32."""
    import gguf

    array = np.ascontiguousarray(values.float().cpu().numpy())
    kind = gguf.GGMLQuantizationType[stored_format(array, asked).upper()]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(array, kind), kind).reshape(array.shape).copy())
