"""What operations keep, move and compute, counted as they run: on real tensors or on fake ones.

`LiveBytes` counts bytes; `flop_counter` counts FLOPs, also of operations that torch does not know. Used by the
traces of a plan and by `plan.probe`, so that bytes moved and bytes/s are counted alike.
"""

import weakref
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewright.ops.native import dequant_gemm  # noqa: F401  these register operators that are counted here
from tilewright.precision import tile_products  # noqa: F401

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


def _flash_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(query, key, value)


def _product_flops(operand: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    return 2 * prod(out_shape) * operand[1]


def _grouped_flops(rows: Any, weights: Any, *args: Any, **kwargs: Any) -> int:
    """Each row [M, K] meets the weight [K, N] of one expert."""
    return 2 * prod(rows) * weights[-1]


_aten = torch.ops.aten
_FLASH_ON_CPU = {_aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops}
"""torch's counter knows the fused attentions of CUDA only."""
_PRODUCTS = (torch.ops.tilewright.dequant_gemm, torch.ops.tilewright.tile_fprop)
COUNTED = {
    **_FLASH_ON_CPU,
    _aten._grouped_mm: _grouped_flops,
    **dict.fromkeys(_PRODUCTS, _product_flops),
}
_WALKS_NOWHERE = (
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
_GATHERS = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather)
"""They read as much as they write, however large the table is."""
ATTENTION = (
    *_FLASH_ON_CPU,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
)


def flop_counter() -> "FlopCounterMode":
    """torch's counter of FLOPs, with our operations. Imported here: it loads triton, and that a fifth of a second,
    which plans of our own decoder need not wait for."""
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False, custom_mapping=COUNTED)


def _moves(func: Any) -> bool:
    """Whether an operation walks over its tensors: not a view, and no product, whose operations are what it costs."""
    from torch.utils.flop_counter import flop_registry  # here, as above

    packet = func.overloadpacket
    if packet in flop_registry or packet in COUNTED or packet in _WALKS_NOWHERE:
        return False
    aliases = [value.alias_info for value in func._schema.returns]
    return not aliases or any(alias is None or alias.is_write for alias in aliases)


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages that operations make, for as long as they live, and bytes that operations move.

    `moved`: read and written by all that is no matrix product and no attention, views left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.moved = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        old = {id(t.untyped_storage()) for t in read}
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for tensor in written:
            self._add(tensor.untyped_storage(), old)
        if _moves(func):
            walked = (*written, *written) if func.overloadpacket in _GATHERS else (*read, *written)
            self.moved += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in walked)
        return out

    def _add(self, storage: torch.UntypedStorage, old: set[int]) -> None:
        key = storage._cdata
        if key in self._known or id(storage) in old:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
