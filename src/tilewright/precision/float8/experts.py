"""The linear layers of many experts as one operation: rows quantised once for all experts, then a matmul each.

An expert's rows are padded to whole tiles (of 128), so that the column-wise copies that weight gradients read hold no
tile of two experts. Read `ExpertRunner` first.

Legend: P rows of all experts, each expert's padded to whole tiles  K input features  M output features.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.formats.tiled import WithCopies
from tilewright.ops.base.transforms import in_func_transform
from tilewright.ops.base.weight_gradient_queue import queue_now
from tilewright.precision.float8.gemm.derivatives import first_order_only
from tilewright.precision.float8.gemm.input_cache import InputCopies
from tilewright.precision.float8.gemm.operands import of_parts, parts_of, quantize_copies, tile_wgrad
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.quantizing_layers import QuantizingSwiGLU
from tilewright.precision.policy.gemm_formats import Gemms


def groupable(experts: Sequence[nn.Module]) -> bool:
    """True where experts can be grouped for FP8: their layers have 8-bit matmuls throughout and agree on their formats,
    and have no bias.

    Nor adapters, which are added where a layer is called.
    """
    layers = [layer for expert in experts for layer in expert.children()]
    settings = {(layer.gemms, layer.power_of_two) for layer in layers if isinstance(layer, Float8Linear)}
    return (
        all(isinstance(layer, Float8Linear) and layer.bias is None and not hasattr(layer, "lora_A") for layer in layers)
        and len(settings) == 1
        and all(gemms.all_scaled and _can_be_joined(gemms) for gemms, _ in settings)
    )


def _can_be_joined(gemms: Gemms) -> bool:
    """True where FP8 experts can be joined: rows of several quantised together are what each of them would have alone.
    (One scale over all would be another format.)"""
    forms = {each.operands.input for each in gemms.formats if each.operands is not None}
    forms |= {each.operands.gradient for each in gemms.formats if each.operands is not None}
    return all(form.in_rows for form in forms) and len({form.tile.cols for form in forms}) == 1


class ExpertRunner:
    """down(silu(gate(x)) * up(x)) of all experts, each on its own rows."""

    def fits(self, experts: Sequence[nn.Module]) -> bool:
        """True where FP8 experts fit to run as one: they agree, as a switch at run time may have set them apart, and
        tensors have memory to cut."""
        return not in_func_transform() and groupable(experts)

    def __call__(self, rows: Sequence[Tensor], experts: Sequence[nn.Module]) -> list[Tensor]:
        """Run FP8 experts: rows of each [n, K] -> its result [n, K]."""
        counts = [len(x) for x in rows]
        gates, ups, downs = (_projections(experts, name) for name in ("gate_proj", "up_proj", "down_proj"))
        first = gates[0]
        width = first.operand_formats.input.tile.cols
        x_PK = torch.cat([F.pad(x, (0, 0, 0, -len(x) % width)) for x in rows])
        copies = _copies(x_PK, first)
        gate_PM = grouped_tile_linear(x_PK, counts, gates, copies)
        up_PM = grouped_tile_linear(x_PK, counts, ups, copies)
        assert first.kernels is not None, "convert gives each Float8Linear its kernels"
        hidden = QuantizingSwiGLU(first.kernels, first.operand_formats.input)(gate_PM, up_PM)
        assert isinstance(hidden, WithCopies), "`fits` says no inside of a torch.func transform"
        copies = InputCopies(hidden.row, hidden.column)
        out_PK = grouped_tile_linear(hidden.value, counts, downs, copies)
        parts = out_PK.split([end - start for start, end in _spans(counts, width)])
        return [part[:count] for part, count in zip(parts, counts, strict=True)]


def _projections(experts: Sequence[nn.Module], name: str) -> list[Float8Linear]:
    """One linear layer of each FP8 expert, all of them as `groupable` says."""
    return [cast(Float8Linear, getattr(expert, name)) for expert in experts]


def grouped_tile_linear(
    x_PK: Tensor, counts: Sequence[int], layers: Sequence[Float8Linear], copies: InputCopies | None = None
) -> Tensor:
    """Compute x W_e^T for the rows of each FP8 expert e, as one grouped operation.

    Args:
        x_PK: rows of expert 0, zero rows up to a multiple of 128, rows of expert 1, ...
        counts: rows of each expert, padding not counted.
        layers: one of equal shape and formats an expert, see `groupable`.
        copies: 8-bit copies of x that another call has made; None makes them.

    Returns:
        [P, M] in the layers' output dtype; rows of padding hold zeros.
    """
    first = layers[0]
    if copies is None:
        copies = _copies(x_PK, first)
    if copies.row is None:
        raise AssertionError("grouped layers have matmuls of scaled operands throughout")
    weights = [layer.weight for layer in layers]
    return _GroupedMatmuls.apply(
        x_PK, *parts_of(copies.row), *parts_of(copies.column), tuple(counts), tuple(layers), queue_now(first), *weights
    )


def _copies(x_PK: Tensor, first: Float8Linear) -> InputCopies:
    if first.kernels is None:
        raise AssertionError("convert gives each Float8Linear its kernels")
    wanted = {"row": True, "column": torch.is_grad_enabled()}
    return InputCopies(*quantize_copies(x_PK.detach(), first.operand_formats.input, first.kernels, **wanted))


def _spans(counts: Sequence[int], width: int) -> list[tuple[int, int]]:
    """First and last row of each FP8 expert, its padding to tiles of this width included."""
    ends = list(accumulate(-(-count // width) * width for count in counts))
    return list(zip([0, *ends], ends, strict=False))


class _GroupedMatmuls(torch.autograd.Function):
    """The three matmuls of each expert."""

    @staticmethod
    def forward(ctx, x_PK, row_qdata, row_scale, row_second, *rest):
        *column, counts, layers, queue = rest[:6]
        weights_MK, first = rest[6:], layers[0]
        row = of_parts(first.operand_formats.input, (row_qdata, row_scale, row_second))
        assert row is not None, "`grouped_tile_linear` has seen to it"
        spans = _spans(counts, first.operand_formats.input.tile.cols)
        outs = []
        for layer, weight_MK, (start, end) in zip(layers, weights_MK, spans, strict=True):
            weight = layer.quantized_weight(weight_MK)
            layer.note_executed("fprop")
            outs.append(first.kernels.tile_gemm(row.rows(start, end), weight, out_dtype=first.output_dtype))
        ctx.save_for_backward(*column, *weights_MK)
        ctx.spans, ctx.layers, ctx.x_dtype, ctx.gemms = spans, layers, x_PK.dtype, first.gemms
        ctx.queue, ctx.weights = queue, weights_MK if queue is not None else ()
        return torch.cat(outs)

    @staticmethod
    def backward(ctx, dy_PM):
        column_qdata, column_scale, column_second, *weights_MK = ctx.saved_tensors
        # 1. The gradient of all rows in 8 bits, row-wise for dgrad and column-wise for wgrad: once for all experts.
        first = ctx.layers[0]
        kernels = first.kernels
        x = of_parts(first.operand_formats.input, (column_qdata, column_scale, column_second))
        for_row, for_column = (
            form.operands.gradient.relaxed(power_of_two=first.power_of_two)
            for form in (ctx.gemms.dgrad, ctx.gemms.wgrad)
        )
        row, column = quantize_copies(dy_PM, for_row, kernels, row=True, column=True)
        if for_row != for_column:
            _, column = quantize_copies(dy_PM, for_column, kernels, row=False, column=True)
        assert row is not None, "it was asked for"
        # 2. Expert by expert, each with its span of rows. Padding is zero and adds nothing.
        dx_parts, dweights = [], []
        for index, (start, end) in enumerate(ctx.spans):
            weight = ctx.layers[index].quantized_weight(weights_MK[index], transposed=True)
            ctx.layers[index].note_executed("dgrad")
            dx_parts.append(kernels.tile_gemm(row.rows(start, end), weight, out_dtype=ctx.x_dtype))  # [p, M] @ [M, K]
            if not ctx.needs_input_grad[10 + index]:
                dweights.append(None)
                continue
            ctx.layers[index].note_executed("wgrad")
            assert column is not None, "it was asked for"
            assert x is not None, "kept where a weight wants its gradient"
            dy, inputs = column.columns(start, end), x.columns(start, end)
            waiting = tile_wgrad(kernels, dy, inputs, ctx.layers[index].weight.dtype)  # [M, p] @ [p, K]
            # A pipeline that splits backward computes gradients of weights later.
            if ctx.queue is not None and ctx.queue.takes(ctx.weights[index]):
                ctx.queue.add(ctx.weights[index], waiting)
                dweights.append(None)
            else:
                dweights.append(waiting.compute())
        dx, *dweights = first_order_only(torch.cat(dx_parts), *dweights, of=(dy_PM, *weights_MK))
        return dx, *[None] * 9, *dweights
