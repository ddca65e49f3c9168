"""`dynamic_quantize`: a tensor to integers over its own range, as the article on training principles has it, mended.

The printed function casts codes from 0 to 255 to signed bytes, so that those above 127 wrap around; divides zero by
zero for a constant tensor; and returns no scale, so that its codes mean nothing to who has only them.
"""

import torch
from torch import Tensor

from tilewright.core.errors import ConfigError, NumericsError
from tilewright.formats.integer import IntegerTensor, IntSpec, quantize_integer
from tilewright.formats.scaling import TENSORWISE


def dynamic_quantize(tensor: Tensor, bit_width: int = 8) -> tuple[IntegerTensor, Tensor]:
    """Quantise by dynamic range: one scale and zero point for the whole tensor, from its smallest to its largest value
    and zero.

    Args:
        tensor: any shape, also empty; float.
        bit_width: 2 to 8.

    Returns:
        (codes with scale and zero point, as a matrix [1, elements]; their values in the tensor's shape, FP32).

    Raises:
        ConfigError: another bit width, or a tensor that is not of floating-point numbers.
        NumericsError: an element is infinite or NaN, which no integer stands for.

    Example:
        >>> codes, values = dynamic_quantize(torch.tensor([-1.0, 0.0, 1.55]), bit_width=8)
        >>> codes.codes.tolist(), codes.zero_point.item(), values.tolist()[1]
        ([[-128, -28, 127]], -28, 0.0)
        >>> dynamic_quantize(torch.full((2,), 3.0))[1].tolist()
        [3.0, 3.0]
    """
    if not (isinstance(bit_width, int) and 2 <= bit_width <= 8 and tensor.is_floating_point()):
        raise ConfigError(
            "dynamic_quantize takes floating-point numbers to 2 to 8 bits",
            got=f"{tensor.dtype}, bit_width = {bit_width!r}",
            need="a float tensor, a whole number from 2 to 8",
            try_="bit_width = 8",
            where="bit_width" if tensor.is_floating_point() else "tensor",
        )
    num_bad = int((~torch.isfinite(tensor)).sum())
    if num_bad:
        raise NumericsError(
            "Tensor with values that are not finite cannot be quantised",
            got=f"{num_bad} of {tensor.numel()} elements infinite or NaN",
            need="finite values",
            try_="find where they come from; torch.nan_to_num(tensor) if they may be replaced",
            where="tensor",
        )
    flat = tensor.detach().reshape(1, -1)
    quantized = quantize_integer(flat, IntSpec(bit_width), TENSORWISE, symmetric=False)
    return quantized, quantized.dequantize().view(tensor.shape)
