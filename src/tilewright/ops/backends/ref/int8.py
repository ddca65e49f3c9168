"""The reference for INT8 matmuls: the codes multiplied as FP64 numbers, which holds every sum exactly.

Legend: M rows  N out features  K columns.
"""

import torch
from torch import Tensor


def int8_matmul(codes_MK: Tensor, qdata_NK: Tensor, packed: Tensor, made_from: Tensor | None = None) -> Tensor:
    """Multiply INT8 operands: the reference, see `ops.int8_linear`."""
    return (codes_MK.double() @ qdata_NK.double().T).to(torch.float32)  # [M, N]


def prepack(qdata_NK: Tensor) -> Tensor:
    """Return no elements: the INT8 reference needs no prepacked weight."""
    return qdata_NK.new_empty(0)
