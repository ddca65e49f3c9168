"""AdamW with moments in 8 bits on CPUs by a library in C++: the bits of `ops.backends.ref.low_bit_adam` in one pass."""

import torch

from tilewright.ops.backends.cpu.build import LOW_BIT_ADAM
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.ref.low_bit_adam import LowBitTensors, factors

_FP32, _BF16, _SPLIT24 = range(3)
"""What the library calls the kinds of target."""


def low_bit_adam(tensors: LowBitTensors, hyper: AdamHyper) -> None:
    """See `ops.adam`."""
    target, low, grad = tensors.target, tensors.low, tensors.grad
    kind = _FP32 if target.dtype == torch.float32 else _BF16 if low is None else _SPLIT24
    qdata = (tensors.exp_avg, tensors.exp_avg_scale, tensors.exp_avg_sq, tensors.exp_avg_sq_scale)
    num_rows, length = tensors.rows
    LOW_BIT_ADAM.functions.tw_low_bit_adam(
        kind, grad.dtype == torch.float32, target.data_ptr(), None if low is None else low.data_ptr(), grad.data_ptr(),
        *(tensor.data_ptr() for tensor in qdata), num_rows, length, *factors(hyper), tensors.stream(hyper),
        torch.get_num_threads(),
    )  # fmt: skip
