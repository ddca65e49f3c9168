"""16-bit operands multiplied in FP32, for CPUs that have no 16-bit matrix instructions: where, and the loss's products.

torch's own 16-bit matmul on such a CPU (oneDNN's emulation) ran at a quarter of the speed of its FP32 matmul
(docs/log.md, 2026-11-21). Matmuls of 16-bit numbers are exact in FP32, so only the order of the sums differs.
The loss asks `widens`; linear layers and attention are in `wide_ops`.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright.core.hardware import Machine, cpu_features, cpu_multiplies
from tilewright.ops.base.dispatch import Case

WIDE_PIECE = 2**22
"""Elements of the largest FP32 copy that a product of the head makes."""


def why_not(machine: Machine, case: Case) -> str | None:
    """The `why_not` of candidates that multiply wide (16 bits in FP32)."""
    if case.device_type != "cpu" or case.dtype not in (torch.bfloat16, torch.float16):
        return "it is for 16-bit operands on CPUs"
    return "the CPU multiplies this format itself" if machine.cpu_multiplies(case.dtype) else None


def widens(device_type: str, dtype: torch.dtype) -> bool:
    """True if this device multiplies wide: matmuls of this dtype are faster in FP32: a CPU without instructions for
    them."""
    if torch.compiler.is_compiling():
        from tilewright.ops.base.opaque import constant  # its decorators take seconds to import

        return device_type == "cpu" and not constant(_cpu_has, dtype)
    return device_type == "cpu" and not _cpu_has(dtype)


def _cpu_has(dtype: torch.dtype) -> bool:
    return cpu_multiplies(dtype, _features())


@functools.cache
def _features() -> frozenset[str]:
    return cpu_features()


class WideHead:
    """The three products of an output head with 16-bit operands, summed in FP32.

    The weight goes by pieces of its rows, so that nothing in FP32 is as large as it or as the logits. Its gradient is
    summed in FP32 over the chunks; nothing of it is rounded between.

    Args:
        weight_VD: in the operands' dtype.
    """

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def logits(self, x_CD: Tensor, out_CV: Tensor) -> Tensor:
        """Logits of a loss's head multiplied wide, x W^T, written to `out`."""
        wide_CD = x_CD.float()
        with self._no_autocast():
            for rows in self._pieces(x_CD):
                out_CV[:, rows] = wide_CD @ self.weight_VD[rows].float().T
        return out_CV

    def input_gradient(self, dlogits_CV: Tensor, out_CD: Tensor) -> None:
        """Input's gradient of a loss's head multiplied wide, dlogits W, written to `out`."""
        sum_CD = torch.zeros_like(out_CD, dtype=torch.float32)
        with self._no_autocast():
            for rows in self._pieces(out_CD):
                sum_CD.addmm_(dlogits_CV[:, rows].float(), self.weight_VD[rows].float())
        out_CD.copy_(sum_CD)

    def add_weight_gradient(self, dweight_VD: Tensor, dlogits_CV: Tensor, x_CD: Tensor) -> None:
        """Weight's gradient of a loss's head multiplied wide, dlogits^T x, added in FP32."""
        wide_CD = x_CD.float()
        with self._no_autocast():
            for rows in self._pieces(x_CD):
                dweight_VD[rows].addmm_(dlogits_CV[:, rows].float().T, wide_CD)

    def _no_autocast(self) -> torch.autocast:
        """Turn autocast off around wide operands: the caller's would round them again."""
        return torch.autocast(self.weight_VD.device.type, enabled=False)

    def _pieces(self, x_CD: Tensor) -> Iterator[slice]:
        vocab_size, longest = self.weight_VD.shape[0], max(1, *x_CD.shape)
        step = max(1, WIDE_PIECE // longest)
        for start in range(0, vocab_size, step):
            yield slice(start, min(start + step, vocab_size))
