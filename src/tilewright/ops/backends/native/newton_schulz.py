"""Newton-Schulz iteration in torch's matmuls: in BF16, with torch.optim.Muon's order of operations, or in FP32.

Legend: E matrices of a stack  R rows  C columns  S the smaller of R and C.
"""

import torch
from torch import Tensor

from tilewright.ops.backends.ref.math import MUON_COEFFICIENTS, MUON_EPS


def native(x_RC: Tensor, num_steps: int = 5) -> Tensor:
    """Newton-Schulz iterations; see `ops.newton_schulz`; by BF16 matmuls alone.

    Example:
        >>> singular = torch.linalg.svdvals(native(torch.diag(torch.tensor([9.0, 3.0, 1.0]))).float())
        >>> bool((singular > 0.5).all() and (singular < 1.3).all())
        True
    """
    argument = [x_RC]
    del x_RC  # a caller may have nothing else to do with it
    return _newton_schulz(argument, num_steps, torch.bfloat16)


def wide(x_RC: Tensor, num_steps: int = 5) -> Tensor:
    """Newton-Schulz iterations; see `ops.newton_schulz`; FP32 inside."""
    argument = [x_RC]
    del x_RC
    with torch.autocast("cpu", enabled=False):
        return _newton_schulz(argument, num_steps, torch.float32)


def _newton_schulz(argument: list[Tensor], num_steps: int, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz by torch's matmuls. `argument`: one tensor, which is taken out, so that it can be freed on the
    way."""
    x = argument.pop().to(torch.bfloat16).to(dtype)
    if not x.numel():
        return x.to(torch.bfloat16)
    norm = x.norm() if x.ndim == 2 else torch.stack([matrix.norm() for matrix in x])[:, None, None]
    x = x / norm.clamp(min=MUON_EPS)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # so that its products with itself are on its smaller side
    a, b, c = MUON_COEFFICIENTS
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(num_steps):
        gram_SS = x @ x.mT
        update_SS = add(gram_SS, gram_SS, gram_SS, beta=b, alpha=c)
        x = add(x, update_SS, x, beta=a)
    return (x.mT if tall else x).to(torch.bfloat16)
