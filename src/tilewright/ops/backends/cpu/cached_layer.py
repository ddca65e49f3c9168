"""A layer for the next token of a few rows on CPUs by a library in C++, one call in the place of forty.

Legend: N rows  D model width  H query heads  K key heads  d their width  F hidden width  T positions.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.core.hardware import Machine
from tilewright.ops.backends.cpu.addresses import address
from tilewright.ops.backends.cpu.build import CACHED_LAYER
from tilewright.ops.backends.cpu.row_linear import DTYPES, MOST_ROWS
from tilewright.ops.backends.ref.cached_layer import LayerWeights, RowPast
from tilewright.ops.base.dispatch import Case


def why_not(machine: Machine, case: Case) -> str | None:
    """The `why_not` of the cached layer in C++. Builds the library where it is not there yet (seconds)."""
    if case.dtype not in DTYPES:
        return "it reads weights in FP32 or BF16"
    return CACHED_LAYER.why_not(machine, case)


def cached_layer(
    x_ND: Tensor, weights: LayerWeights, eps: float, cos_NR: Tensor, sin_NR: Tensor, pasts: Sequence[RowPast]
) -> Tensor:
    """Run a whole layer for the next token of a few rows, on a CPU in C++: see `ops.linear`.

    Raises:
        TypeError: tensors of several dtypes, of others than FP32 and BF16, or not all on the CPU.
        ValueError: more rows or none, shapes that do not fit together, or weights or caches that are not contiguous.
        MemoryError: no memory for what lies between.
    """
    dtype, (rows, width) = x_ND.dtype, x_ND.shape
    kept = [tensor for past in pasts for tensor in past]
    if dtype not in DTYPES or not all(each.dtype == dtype and each.is_cpu for each in (x_ND, *weights.tensors, *kept)):
        raise TypeError(f"FP32 or BF16 for all on the CPU are needed: {dtype} and others")
    _check_shapes(x_ND, weights, cos_NR, sin_NR, pasts)
    (_, keys, dim), attention, mlp = kept[0].shape if kept else (0, 0, 0), weights.attention, weights.mlp
    x_ND, out_ND = x_ND.contiguous(), torch.empty((rows, width), dtype=dtype)
    angles = [each.to(torch.float32).expand(rows, -1).contiguous() for each in (cos_NR, sin_NR)]
    of_rows = (ctypes.c_int64 * (3 * rows))(
        *(fact for keys_, values in pasts for fact in (address(keys_), address(values), len(keys_)))
    )
    layer = (ctypes.c_int64 * 20)(
        *(rows, width, keys, len(attention.q) // (keys * dim) if attention else 0, dim, len(mlp.gate_FD) if mlp else 0),
        *(address(each) or 0 for each in (*(attention or [None] * 5), *(mlp or [None] * 4))),
        *(address(each) for each in (*angles, x_ND, out_ND)),
        ctypes.addressof(of_rows),
    )
    if CACHED_LAYER.functions.tw_cached_layer(dtype == torch.bfloat16, layer, eps, torch.get_num_threads()):
        raise MemoryError(f"no memory for what lies between, of {rows} rows in a layer of {width}")
    return out_ND


def _check_shapes(
    x_ND: Tensor, weights: LayerWeights, cos_NR: Tensor, sin_NR: Tensor, pasts: Sequence[RowPast]
) -> None:
    (rows, width), attention, mlp = x_ND.shape, weights.attention, weights.mlp
    if not 1 <= rows <= MOST_ROWS or len(pasts) != (rows if attention else 0):
        raise ValueError(f"1 to {MOST_ROWS} rows with a cache each are needed: {rows} with {len(pasts)}")
    if not all(each.is_contiguous() for each in weights.tensors):
        raise ValueError("contiguous weights are needed")
    if mlp is not None:
        hidden = len(mlp.gate_FD)
        if tuple(each.shape for each in mlp) != ((width,), (hidden, width), (hidden, width), (width, hidden)):
            raise ValueError(f"weights of an MLP of {width} columns are needed: {[*map(len, mlp)]} rows")
    elif attention is None:
        raise ValueError("attention or an MLP is needed: neither is given")
    if attention is None:
        return
    _, keys, dim = pasts[0].keys_TKd.shape
    queries, of_keys = len(attention.q), keys * dim
    wanted = (width,), (queries, width), (of_keys, width), (of_keys, width), (width, queries)
    if queries % of_keys or dim % 2 or tuple(each.shape for each in attention) != wanted:
        raise ValueError(f"attention with {keys} key heads of {dim} is needed: {[*map(len, attention)]} rows")
    if any(each.shape not in ((rows, dim // 2), (1, dim // 2)) for each in (cos_NR, sin_NR)):
        raise ValueError(f"angles of {dim // 2} pairs for {rows} rows or one are needed: {tuple(cos_NR.shape)}")
    for keys_TKd, values_TKd in pasts:
        if keys_TKd.shape != values_TKd.shape or keys_TKd.shape[1:] != (keys, dim) or not len(keys_TKd):
            raise ValueError(f"keys and values of {keys} heads of {dim} are needed: {tuple(keys_TKd.shape)}")
    if not all(each.is_contiguous() for past in pasts for each in past):
        raise ValueError("contiguous caches are needed")
