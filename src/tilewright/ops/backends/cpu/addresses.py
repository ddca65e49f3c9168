"""Addresses of tensors for libraries in C++, which read and write whatever is there."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element, for a call of a library; None for no tensor.

    Raises:
        TypeError: it has no bytes of its own on the CPU: that of a model that is only traced (FakeTensorMode, the meta
            device), a wrapper of other tensors (DTensor), or one whose storage is freed. Its address would be zero.
    """
    if tensor is None:
        return None
    if type(tensor) is FakeTensor or not tensor.is_cpu:
        where = "of FakeTensorMode" if type(tensor) is FakeTensor else f"on {tensor.device}"
        raise _no_bytes(tensor, where, "Trace the operation's `ref` candidate instead")
    found = tensor.data_ptr()
    if found == 0 and tensor.numel():
        raise _no_bytes(tensor, f"in a {type(tensor).__name__} without storage", "Give the local tensor (`to_local`)")
    return found


def _no_bytes(tensor: Tensor, where: str, try_: str) -> TypeError:
    """The error of a tensor that has no address."""
    got = f"{tuple(tensor.shape)} {tensor.dtype} {where}"
    return TypeError(f"Kernels in C++ need tensors with bytes on the CPU: got {got}. {try_}")
