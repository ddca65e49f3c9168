"""Addresses of tensors for libraries in C++, which read and write whatever is there."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element, for a call of a library; None for no tensor.

    Raises:
        TypeError: it has no bytes on the CPU, as of a model that is only traced (FakeTensorMode, the meta device). Its
            address would be zero.
    """
    if tensor is None:
        return None
    if type(tensor) is FakeTensor or not tensor.is_cpu:
        where = "of FakeTensorMode" if type(tensor) is FakeTensor else f"on {tensor.device}"
        raise TypeError(
            f"Kernels in C++ need tensors with bytes on the CPU: got {tuple(tensor.shape)} {tensor.dtype} {where}. "
            "Trace the operation's `ref` candidate instead"
        )
    return tensor.data_ptr()
