"""Newton-Schulz iteration: a matrix with its singular values moved towards 1, by BF16 matmuls alone.

The quintic polynomial, its coefficients and its order of operations are those of `torch.optim.Muon`, whose bits a
single matrix has. Their source: K. Jordan, "Muon", kellerjordan.github.io/posts/muon. Five iterations bring singular
values to about 0.7 to 1.2, not to 1: an update needs no more.

Legend: E matrices of a stack  R rows  C columns  S the smaller of R and C.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
"""Least norm that a matrix is divided by."""


def newton_schulz(x_RC: Tensor, num_steps: int = 5) -> Tensor:
    """U V^T, nearly, where x = U diag(s) V^T.

    Args:
        x_RC: any float dtype and layout; or a stack [E, R, C], each of whose matrices is treated by itself.
        num_steps: iterations.

    Returns:
        BF16, of the same shape. Zeros stay zeros.

    Example:
        >>> singular = torch.linalg.svdvals(newton_schulz(torch.diag(torch.tensor([9.0, 3.0, 1.0]))).float())
        >>> bool((singular > 0.5).all() and (singular < 1.3).all())
        True
    """
    x = x_RC.to(torch.bfloat16)
    if not x.numel():
        return x
    norm = x.norm() if x.ndim == 2 else torch.stack([matrix.norm() for matrix in x])[:, None, None]
    del x_RC  # a caller may have nothing else to do with it
    x = x / norm.clamp(min=EPS)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # so that its products with itself are on its smaller side
    a, b, c = COEFFICIENTS
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(num_steps):
        gram_SS = x @ x.mT
        update_SS = add(gram_SS, gram_SS, gram_SS, beta=b, alpha=c)
        x = add(x, update_SS, x, beta=a)
    return x.mT if tall else x
