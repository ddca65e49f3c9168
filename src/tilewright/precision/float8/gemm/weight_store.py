"""FP8 data of a weight, kept from one pass to the next together with a fingerprint of what it was made from.

PyTorch has no reliable sign that a weight was written: torch's fused AdamW, writes through `.data`, numpy or a tensor
of `inference_mode`, and a re-assigned parameter leave `_version` where it was or start another one. So the weight's
bytes are hashed (XXH3, 64 bits) wherever the data are used, and quantised again when the hash differs. The hash reads
a weight in about a fifth of the time that quantising takes (docs/log.md).

Only on a CPU: on a GPU a check reads 4 bytes per element where quantising reads 4 and writes 1, and comparing the
hashes would wait for the device. There a weight is quantised in each pass.

One byte tensor holds all of it, so that a copy of the store is a whole store. Its layout, each part padded to 64 bytes:
the hash and a flag that it is valid (8 bytes each), the second scale (4 bytes), scale_inv, FP8 data.

Legend: M output features  K input features.
"""

import math

import torch
from torch import Tensor

from tilewright.formats.tiled import OperandFormat, TiledTensor
from tilewright.ops.base.fingerprint import fingerprint
from tilewright.ops.kernels import Kernels

_ALIGN = 64


def new_store(weight_MK: Tensor, form: OperandFormat) -> Tensor | None:
    """A new store for the FP8 data of a weight [M, K]: uint8, about M * K bytes; None where weights are quantised in
    each pass."""
    if weight_MK.device.type != "cpu":
        return None
    # Of inference_mode's own tensors autograd could save none.
    with torch.inference_mode(False):
        return torch.zeros(store_bytes(weight_MK.shape, form), dtype=torch.uint8, device="cpu")


def stored_weight(store: Tensor, weight_MK: Tensor, kernels: Kernels, form: OperandFormat) -> TiledTensor:
    """The FP8 data of a weight as it is now: stored data if it belongs to the present weight, else new data, which is
    stored.

    Args:
        store: of `new_store`; written where it holds the data of other values.
        weight_MK: [M, K], any float dtype. One that has no place in the store (another size, not contiguous) is
            quantised without it.
        kernels: implementations.
        form: of the data. A store belongs to one for good.

    Returns:
        [M, K] in `form`. The data are the store's own memory, which the next call may write to.
    """
    if store.numel() != store_bytes(weight_MK.shape, form) or not weight_MK.is_contiguous():
        return kernels.quantize(weight_MK, form)
    store = store.data  # a cache is no value of autograd's: writing to it must not look like a change of one
    print_ = fingerprint(weight_MK)
    header = store[:16].view(torch.int64)
    tiled = contents(store, weight_MK.shape, form)
    if header.tolist() != [print_, 1]:
        header[1] = 0
        fresh = kernels.quantize(weight_MK, form)
        tiled.qdata.copy_(fresh.qdata)
        tiled.scale_inv.copy_(fresh.scale_inv)
        if tiled.second is not None and fresh.second is not None:
            tiled.second.copy_(fresh.second)
        header[0], header[1] = print_, 1
    return tiled


def weight_operand(
    store: Tensor | None, weight_MK: Tensor, kernels: Kernels, form: OperandFormat, *, transposed: bool = False
) -> TiledTensor:
    """A stored weight as a matmul reads it: [M, K], or [K, M] for the input's gradient. If tiles are square the
    transposed one is the same codes and scales, else it is quantised along its own rows, in each pass.

    Without a store, off the CPU, the transposed one is quantised as what it is, also of square tiles: kernels there
    multiply codes row by row, and store them so in the pass that makes them; a view would be copied after it."""
    if transposed and (not form.is_square or (store is None and weight_MK.device.type != "cpu")):
        return kernels.quantize(weight_MK.T, form)
    found = kernels.quantize(weight_MK, form) if store is None else stored_weight(store, weight_MK, kernels, form)
    return found.transposed() if transposed else found


def contents(store: Tensor, shape: tuple[int, ...], form: OperandFormat) -> TiledTensor:
    """The FP8 data [M, K] and scales in a weight's store, unchecked."""
    grid, dtype = form.tile.grid((shape[0], shape[1])), form.scale.dtype
    scale_inv = store[_ALIGN : _ALIGN + dtype.itemsize * math.prod(grid)].view(dtype).view(grid)
    start = store.numel() - _padded(math.prod(shape))
    second = store[16:20].view(torch.float32).view(1, 1) if form.scale.second else None
    return form.tensor(store[start : start + math.prod(shape)].view(shape), scale_inv, second)


def store_bytes(shape: tuple[int, ...], form: OperandFormat) -> int:
    """Bytes of a store for the FP8 data of a weight of this shape."""
    grid = form.tile.grid((shape[0], shape[1]))
    return _ALIGN + _padded(form.scale.dtype.itemsize * math.prod(grid)) + _padded(math.prod(shape))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
