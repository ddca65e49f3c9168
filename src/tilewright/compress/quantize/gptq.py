"""GPTQ: columns rounded one after another, the error of each carried to the columns after it.

Minimises ||(W - Q) X^T|| greedily, given H = X^T X of the layer's inputs. Scales of a group are found when its first
column is reached, from the weights as corrected by then. All in FP64.

See: Frantar et al., "GPTQ", 2023, algorithm 1 (Cholesky form, no reordering of columns).

Legend: N out features  K in features  G groups of a row.
"""

import torch
from torch import Tensor

from tilewright.compress.quantize.least_error import least_error_scale
from tilewright.formats.integer import IntegerTensor, IntSpec, scale_of_range, tile_range
from tilewright.formats.scaling import Tile

DAMPING = 0.01
"""Share of the mean diagonal that is added to it, as in the paper."""
_BLOCK = 128


def gptq(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    spec: IntSpec,
    tile: Tile,
    *,
    symmetric: bool = True,
    half_scales: bool = False,
    negative_scales: bool = False,
    damping: float = DAMPING,
) -> IntegerTensor:
    """Quantise a weight by GPTQ to codes and scales.

    Args:
        weight_NK: float, finite.
        hessian_KK: X^T X of the inputs, FP64. Inputs that were always zero are rounded to nearest.
        spec: the format.
        tile: `Tile(1, group)`, or `Tile(1, 0)` for one scale per row.
        symmetric: no zero points.
        half_scales: scales are numbers of FP16 with the least squared error of a group's weights, see `least_error`;
            without zero points only.
        negative_scales: with `half_scales`, they may be negative.
        damping: see `DAMPING`.

    Example: inputs that are always equal, so only the sum counts. The second weight takes up what the first lost.
        >>> from tilewright.formats.integer import INT4
        >>> gptq(torch.tensor([[1.4, 1.4, 7.0]]), torch.ones(3, 3), INT4, Tile(1, 0)).dequantize().tolist()
        [[1.0, 2.0, 7.0]]
    """
    weight = weight_NK.detach().double().clone()
    num_out, num_in = weight.shape
    group = tile.cols or max(num_in, 1)
    upper = _inverse_cholesky(hessian_KK.double(), damping)
    scales, points, codes = [], [], torch.zeros((num_out, num_in), dtype=torch.int8)
    scale_N = point_N = torch.empty(0, dtype=torch.float64)
    for start in range(0, num_in, _BLOCK):
        end = min(start + _BLOCK, num_in)
        errors = torch.zeros((num_out, end - start), dtype=torch.float64)
        for k in range(start, end):
            if k % group == 0:
                # What blocks before did to columns behind this one has arrived; of this block's errors take the rest.
                ahead = weight[:, k : k + group].clone()
                if k + group > end and k > start:
                    ahead[:, end - k :] -= errors[:, : k - start] @ upper[start:k, end : k + group]
                if half_scales:
                    scale = least_error_scale(ahead.float(), spec, Tile(1, 0), half=True, negative=negative_scales)
                    point = None
                else:
                    scale, point = scale_of_range(*tile_range(ahead.float(), Tile(1, 0)), spec, symmetric=symmetric)
                scales.append(scale)
                points.append(torch.zeros_like(scale, dtype=torch.int8) if point is None else point)
                scale_N, point_N = scale[:, 0].double(), points[-1][:, 0].double()
            code_N = ((weight[:, k] / scale_N).round() + point_N).clamp(spec.lowest, spec.highest)
            codes[:, k] = code_N.to(torch.int8)
            error_N = (weight[:, k] - (code_N - point_N) * scale_N) / upper[k, k]
            weight[:, k + 1 : end] -= error_N[:, None] * upper[k, k + 1 : end]
            errors[:, k - start] = error_N
        weight[:, end:] -= errors @ upper[start:end, end:]
    grid = tile.grid((num_out, num_in))
    scale = torch.cat(scales, dim=1) if scales else torch.zeros(grid)
    return IntegerTensor(codes, scale, None if symmetric or not points else torch.cat(points, dim=1), tile, spec)


def output_error(weight_NK: Tensor, rounded_NK: Tensor, hessian_KK: Tensor) -> float:
    """GPTQ's output error: ||(W - Q) X^T||^2 from H = X^T X."""
    lost = weight_NK.double() - rounded_NK.double()
    return float(((lost @ hessian_KK.double()) * lost).sum())


def _inverse_cholesky(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of GPTQ's damped matrix."""
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if bool((~dead).any()) else 1.0
    damped = hessian + torch.diag(torch.where(dead, mean, damping * mean))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)
