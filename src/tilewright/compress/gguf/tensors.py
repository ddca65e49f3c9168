"""A model's weights under llama.cpp's names, in its order of rows and its formats.

Legend: H heads  D head width  R rows  C columns.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from tilewright.compress.gguf.architecture import GGUFShape

BLOCK = 32
"""Elements with one scale, in Q8_0 and Q4_0; a row must hold whole blocks."""


def named_tensors(weights: Mapping[str, Tensor], shape: GGUFShape) -> Iterator[tuple[str, np.ndarray]]:
    """(name in the file, FP32 array) of each weight, one at a time."""
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == shape.arch)
    names = gguf.get_tensor_name_map(arch, shape.num_layers)
    for name, tensor in weights.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise AssertionError(f"llama.cpp's {shape.arch} has no tensor {name}")
        array = tensor.float().cpu().numpy()
        if shape.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = to_neighbours(array, shape.head_dim)
        yield theirs, np.ascontiguousarray(array)


def to_neighbours(weight_RC: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a projection to rotary heads, reordered so that pairs (i, i + D/2) become (2i, 2i + 1).

    Queries and keys are reordered alike, so their products are the same.

    Example:
        >>> to_neighbours(np.arange(4)[:, None], 4)[:, 0].tolist()
        [0, 2, 1, 3]
    """
    halves = weight_RC.reshape(-1, 2, head_dim // 2, weight_RC.shape[1])
    return halves.swapaxes(1, 2).reshape(weight_RC.shape)


def stored_format(array: np.ndarray, asked: str) -> str:
    """The format of one tensor in a file of `asked` ("f16", "q8_0", "q4_0"): vectors stay FP32, and a matrix whose rows
    are no whole blocks is F16."""
    if array.ndim == 1:
        return "f32"
    return asked if asked == "f16" or array.shape[-1] % BLOCK == 0 else "f16"
