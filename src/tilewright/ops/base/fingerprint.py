"""The content of a tensor as one number: for caches, which must know what they were made from.

PyTorch has no reliable sign that a tensor was written (see `precision.float8.gemm.weight_store`; a write through
`.data` leaves its version as it is): its bytes are read, unless no other holder can have written them.
"""

import functools
import sys
from typing import Any

import torch
import xxhash
from torch import Tensor


def fingerprint(x: Tensor) -> int:
    """Fingerprint a contiguous CPU tensor: XXH3 of its bytes, with its first dimension as the seed, as a signed 64-bit
    number.

    Example:
        >>> x = torch.ones(2, 8)
        >>> fingerprint(x) == fingerprint(torch.ones(2, 8)), fingerprint(x) == fingerprint(x.view(4, 4))
        (True, False)
    """
    data = x.detach().view(-1).view(torch.uint8).numpy().data
    digest = xxhash.xxh3_64_intdigest(data, seed=x.shape[0] if x.ndim else 0)
    return digest - 2**64 if digest >= 2**63 else digest


def is_held_elsewhere(owner: dict[str, Any], name: str) -> bool:
    """True if the memory of the CPU tensor `owner[name]` can be reached from elsewhere: from another tensor, a view, a
    NumPy array, or another process that shares it. True where torch does not say.

    Not seen is a bare address.

    Example:
        >>> held = {"x": torch.zeros(3)}; first = is_held_elsewhere(held, "x")
        >>> array = held["x"].data.numpy()
        >>> first, is_held_elsewhere(held, "x")
        (False, True)
    """
    if not hasattr(torch._C, "_storage_Use_Count"):
        return True
    return owner[name].is_shared() or _holders(owner, name) != _alone()


def _holders(owner: dict[str, Any], name: str) -> tuple[int, int, int]:
    """Count the references to a fingerprinted tensor: to the Python object, to torch's tensor, and to its memory, these
    calls' own among them."""
    storage = torch._C._storage_Use_Count(owner[name].untyped_storage()._cdata)
    return sys.getrefcount(owner[name]), owner[name]._use_count(), storage


@functools.cache
def _alone() -> tuple[int, int, int]:
    return _holders({"x": torch.zeros(1, dtype=torch.int8)}, "x")
