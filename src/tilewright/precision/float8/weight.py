"""The matmuls with a weight that another class than torch's `nn.Linear` owns, each in a format of its own.

A `Float8Weight` holds what a `Float8Linear` holds in addition to its parameters: formats, counts and the kind of
scales. The module hands it the weight as a matrix [M, K], or as a stack of them with the rows of each: operands,
matmuls and gradients are those of a `Float8Linear` with that matrix, bit for bit. `third_party` has the modules;
`convert` sets the formats.

Legend: N tokens  K input features  M output features  E experts  P rows of all experts, one expert after another.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.formats.spec import SPECS
from tilewright.ops.kernels import Kernels
from tilewright.ops.linear import machines_linear
from tilewright.precision.float8.gemm.gemm_ops import StaticConfig, matmuls
from tilewright.precision.float8.gemm.input_cache import InputCopies
from tilewright.precision.float8.gemm.operands import quantize_copies
from tilewright.precision.float8.linear import new_switch, operands_of
from tilewright.precision.policy.gemm_formats import Gemms

T = TypeVar("T")


class ExpertLoop:
    """One pass over the experts of a stack, one after another. A plan's trace has another one (`planner.trace`).

    Args:
        counts: rows of each expert.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def split(self, x_PK: Tensor) -> Sequence[Tensor]:
        """Rows of each expert, split for an FP8 weight."""
        return x_PK.split(self.counts)

    def unbind(self, stack: Tensor) -> Sequence[Tensor]:
        """The parts of an FP8 weight's stack [E, ...], one per expert. Not stack[e]: each such view writes a gradient
        of the whole."""
        return stack.unbind()

    def each(self, of: Callable[[int], T]) -> list[T]:
        """Call a function with the number of each expert of an FP8 weight, and collect its values."""
        return [of(expert) for expert in range(len(self.counts))]

    def join(self, outs_PM: Sequence[Tensor]) -> Tensor:
        """Rows of all experts of an FP8 weight, joined."""
        return torch.cat([out for out, count in zip(outs_PM, self.counts, strict=True) if count])


class Float8Weight:
    """Formats and counts of the matmuls with one weight."""

    def __init__(self) -> None:
        self.compute_dtype = torch.float32
        """Dtype of the operands where `gemms` is None."""
        self.output_dtype = torch.float32
        self.gemms: Gemms | None = None
        """Formats of the three matmuls where 8-bit operands are among them or they differ; else None."""
        self.operand_formats = operands_of(Gemms.all("bf16"))
        """See `Float8Linear.operand_formats`."""
        self.kernels: Kernels | None = None
        self.expert_loop = ExpertLoop
        self.switch = new_switch(Gemms.all("bf16"))

    def set_formats(self, compute: str, output: str) -> None:
        """Set matmuls of 16 or 32 bits with an FP8 weight.

        Args:
            compute: format of the operands, by name ("bf16").
            output: format of the result.
        """
        self.gemms = None
        self.compute_dtype, self.output_dtype = SPECS[compute].dtype, SPECS[output].dtype

    def set_gemms(self, gemms: Gemms, output: str, *, power_of_two: bool) -> None:
        """Set the format of each matmul with an FP8 weight; see `Float8Linear.configure`."""
        self.gemms, self.output_dtype = gemms, SPECS[output].dtype
        self.operand_formats = operands_of(gemms, power_of_two=power_of_two)
        self.switch = new_switch(gemms, power_of_two=power_of_two).after(self.switch)

    @property
    def counts(self) -> Tensor:
        """Counts of an FP8 weight's matmuls, int64 [3, known] on the host: those that ran, of stacked weights one for
        each expert."""
        return self.switch.counts

    def executed(self) -> dict[str, dict[str, int]]:
        """Count the calls of an FP8 weight's matmuls: matmul -> format -> calls so far, for formats that ran."""
        return self.switch.executed()

    # ---- one matrix ----

    def linear(self, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        """Compute x W^T + b with an FP8 weight. x [..., K] any float dtype -> [..., M] `output_dtype`."""
        with torch.autocast(x.device.type, enabled=False):
            out_NM = self._multiply(x.reshape(-1, x.shape[-1]), weight_MK, bias_M, None)
        return out_NM.view(*x.shape[:-1], out_NM.shape[-1])

    def _multiply(self, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, copies: InputCopies | None) -> Tensor:
        if self.gemms is None:
            dtype = self.compute_dtype
            if self.kernels is not None:  # they cast the weight, and give its gradient in as many bits as they can
                return self.kernels.linear(x_NK.to(dtype), weight_MK, bias_M).to(self.output_dtype)
            bias = None if bias_M is None else bias_M.to(dtype)
            return machines_linear(x_NK.to(dtype), weight_MK.to(dtype), bias).to(self.output_dtype)
        if copies is None:
            copies = self._copies(x_NK, weight_MK.requires_grad)
        fixed = StaticConfig(self._keeps_value, self._kernels.spec, self.output_dtype)
        return matmuls(x_NK, weight_MK, bias_M, copies, None, self.switch, fixed)

    def _copies(self, x_NK: Tensor, wants_dw: bool) -> InputCopies:
        if self.gemms is None:
            raise AssertionError("copies are for 8-bit matmuls")
        column = wants_dw and not self._keeps_value and torch.is_grad_enabled()
        row = self.gemms.fprop.scaled
        return InputCopies(
            *quantize_copies(x_NK.detach(), self.operand_formats.input, self._kernels, row=row, column=column)
        )

    @property
    def _keeps_value(self) -> bool:
        """True where backward of an FP8 weight keeps the input itself: the weight's gradient has no 8-bit operands."""
        return self.gemms is not None and not self.gemms.wgrad.scaled

    @property
    def _kernels(self) -> Kernels:
        if self.kernels is None:
            raise AssertionError("convert gives each weight its kernels")
        return self.kernels

    # ---- a stack of matrices ----

    def grouped(self, x_PK: Tensor, counts: Sequence[int], stack_EMK: Tensor, bias_EM: Tensor | None) -> Tensor:
        """Compute x W_e^T + b_e with FP8 weights for the rows of each expert e. An expert without rows does nothing,
        and its gradient is zero.

        Args:
            x_PK: rows of expert 0, of expert 1, ...; any float dtype.
            counts: rows of each expert.
            stack_EMK: the weights, any float dtype and strides.
            bias_EM: the biases or None.

        Returns:
            [P, M] `output_dtype`.
        """
        if sum(counts) != len(x_PK) or len(counts) != len(stack_EMK):
            raise AssertionError(f"{len(x_PK)} rows and {sum(counts)} counted, for {len(counts)} experts")
        if not len(x_PK):
            return x_PK.new_zeros((0, stack_EMK.shape[1]), dtype=self.output_dtype)
        loop = self.expert_loop(counts)
        weights, rows = loop.unbind(stack_EMK), loop.split(x_PK)
        biases = [None] * len(counts) if bias_EM is None else loop.unbind(bias_EM)
        with torch.autocast(x_PK.device.type, enabled=False):
            copies = self._grouped_copies(x_PK.detach(), loop, stack_EMK.requires_grad)
            outs = loop.each(
                lambda e: self._multiply(rows[e], weights[e], biases[e], copies[e]) if counts[e] else rows[e]
            )
        return loop.join(outs)

    def _grouped_copies(self, x_PK: Tensor, loop: ExpertLoop, wants_dw: bool) -> Sequence[InputCopies | None]:
        """Quantise the rows of all experts at once, for a grouped FP8 weight.

        Each expert's rows begin at a whole tile there, so that no tile of a column-wise copy holds two experts'. With
        a scale per tensor each expert has its own, and quantises for itself.
        """
        counts = loop.counts
        if self.gemms is None or not self.gemms.any_scaled or not self.operand_formats.input.in_rows:
            return [None] * len(counts)
        width, rows = self.operand_formats.input.tile.cols, loop.split(x_PK)
        parts = loop.each(lambda e: F.pad(rows[e], (0, 0, 0, -counts[e] % width)))
        starts = [0, *accumulate(count + -count % width for count in counts)]
        both = self._copies(loop.join(parts), wants_dw)

        def copies(expert: int) -> InputCopies:
            start, end = starts[expert], starts[expert] + counts[expert]
            return InputCopies(
                None if both.row is None else both.row.rows(start, end),
                None if both.column is None else both.column.columns(start, end),
            )

        return loop.each(copies)
