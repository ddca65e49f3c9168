"""What a tensor holds, as one number: for caches, which must know what they were made from.

PyTorch has no reliable sign that a tensor was written (see `precision.float8.gemm.weight_store`): its bytes are read.
"""

import torch
import xxhash
from torch import Tensor


def fingerprint(x: Tensor) -> int:
    """XXH3 of the bytes of a contiguous CPU tensor, with its first dimension as the seed: a signed 64-bit number.

    Example:
        >>> x = torch.ones(2, 8)
        >>> fingerprint(x) == fingerprint(torch.ones(2, 8)), fingerprint(x) == fingerprint(x.view(4, 4))
        (True, False)
    """
    data = x.detach().view(-1).view(torch.uint8).numpy()
    digest = xxhash.xxh3_64_intdigest(data, seed=x.shape[0] if x.ndim else 0)
    return digest - 2**64 if digest >= 2**63 else digest
