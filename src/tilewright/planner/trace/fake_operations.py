"""Operations on fake tensors as the machine of a plan runs them, where torch's own shape functions say otherwise.

A trace runs on fake CPU tensors, whatever the machine: autograd on fake CUDA tensors needs a build with CUDA.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class TraceMode(FakeTensorMode):
    """Fake tensors, and grouped GEMMs (experts in one tensor) in any format: torch's shape function knows BF16 alone,
    and the CPU and CUDA kernels run FP32 and FP16 operands too. One mode for both: each costs every operation time.

    Legend: M rows  K depth  N width  E groups.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no operation on fake tensors is compiled here, and torch's wrapper comes with each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            with self:
                return _grouped(*args, **(kwargs or {}))
        return self.dispatch(func, types, args, kwargs or {})


def _grouped(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Shape of the result of a grouped matmul on fake tensors: [M, K] x [E, K, N] -> [M, N], [M, K] x [K, N] -> [E, M,
    N] and the like."""
    if left.dim() == right.dim() == 2:
        assert offs is not None
        shape: tuple[int, ...] = (offs.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], left.shape[1], right.shape[2])
    else:
        shape = (left.shape[-2], right.shape[-1])
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


class _FusedOnGpu(TorchFunctionMode):
    """Attention whose values are narrower than its keys, as a GPU runs it: fused, with values padded. A CPU holds its
    scores instead, and needs no mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and len(args) >= 3 and args[2].shape[-1] < args[1].shape[-1]:
            query, key, value, *rest = args
            padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
            return func(query, key, padded, *rest, **(kwargs or {}))[..., : value.shape[-1]]
        return func(*args, **(kwargs or {}))


def fuse_attention(modules: Iterable[nn.Module]) -> None:
    """Let attention on fake tensors inside of these modules run as a GPU runs it, in backward's recomputation too,
    where no mode that is around is at work."""
    for module in modules:
        entered: list[_FusedOnGpu] = []

        def enter(*_: Any, entered: list[_FusedOnGpu] = entered) -> None:
            mode = _FusedOnGpu()
            mode.__enter__()
            entered.append(mode)

        def leave(*_: Any, entered: list[_FusedOnGpu] = entered) -> None:
            entered.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)
