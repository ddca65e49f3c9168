"""Costs of operations by their kind: FLOPs of matmuls and fused attention, and which of them walk over their tensors.

torch's own counter knows neither the fused attentions of CPUs nor operations of tilewright's own.
"""

import functools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from tilewright.ops.backends.cpu import attention as _cpp_attention  # noqa: F401  they register what is counted here
from tilewright.ops.backends.native import dequant_gemm, wide_ops  # noqa: F401
from tilewright.precision.float8.gemm import gemm_ops  # noqa: F401


def _flash_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(query, key, value)


def _matmul_flops(operand: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    return 2 * prod(out_shape) * operand[-1]


def _grouped_flops(rows: Any, weights: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of operations of the kind grouped matmul: each row [M, K] meets the weight [K, N] of one expert."""
    return 2 * prod(rows) * weights[-1]


_aten = torch.ops.aten
_own = torch.ops.tilewright
_FLASH_ON_CPU = dict.fromkeys(
    (_aten._scaled_dot_product_flash_attention_for_cpu, _own.bf16_attention, _own.masked_bf16_attention), _flash_flops
)
"""torch's counter knows the fused attentions of CUDA only."""
_PRODUCTS = tuple(
    getattr(torch.ops.tilewright, name) for name in ("dequant_gemm", "tile_fprop", "wide_gemm", "wide_batched_gemm")
)
_COUNTED = {
    **_FLASH_ON_CPU,
    _aten._grouped_mm: _grouped_flops,
    **dict.fromkeys(_PRODUCTS, _matmul_flops),
}
_WALKS_NOWHERE = (
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),
    _aten._unsafe_view,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _own.bf16_attention_backward,
    _own.masked_bf16_attention_backward,
)
GATHERS = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather)
"""They read as much as they write, however large the table is."""
ATTENTION = (
    *_FLASH_ON_CPU,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
)


ATTENTION_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
)
"""Left out: plans take backward of attention as a multiple of forward."""


@functools.cache
def formulas() -> Mapping[Any, Callable[..., int]]:
    """FLOPs of operations by kind, from their arguments and `out_val`. Imported here: torch's counter loads triton, and
    that a fifth of a second, which plans of our own decoder need not wait for."""
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    return {**flop_registry, **{packet: shape_wrapper(count) for packet, count in _COUNTED.items()}}


@functools.cache
def is_view(func: Any) -> bool:
    """True if an operation is of the kind that gives its arguments' storage alone."""
    aliases = [value.alias_info for value in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


@functools.cache
def moves(func: Any) -> bool:
    """True if an operation is of the kind that walks over its tensors: not a view, and no matmul, whose operations are
    what it costs."""
    packet = func.overloadpacket
    return not (packet in formulas() or packet in _WALKS_NOWHERE or is_view(func))
