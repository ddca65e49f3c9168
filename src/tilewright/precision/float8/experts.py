"""The linear layers of many experts as one operation: rows quantised once for all experts, then a matmul each.

An expert's rows are padded to whole tiles of 128, so that the column-wise copies that weight gradients read hold no
tile of two experts. Read `ExpertRunner` first.

Legend: P rows of all experts, each expert's padded to a multiple of 128  K input features  M output features.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.formats.scaling import ROW_TILE
from tilewright.formats.spec import E4M3
from tilewright.formats.tiled import TiledTensor, fp8_format
from tilewright.ops.base.transforms import in_func_transform
from tilewright.precision.float8.fused import QuantizingSwiGLU
from tilewright.precision.float8.gemm.derivatives import first_order_only
from tilewright.precision.float8.gemm.input_cache import InputCopies
from tilewright.precision.float8.gemm.operands import gradient_spec, input_tile, quantize_copies
from tilewright.precision.float8.linear import Float8Linear, input_copies
from tilewright.precision.policy.gemm_formats import FP8_FORMATS

ROWS = 128
"""Rows of a tile of the column-wise copies."""


def groupable(experts: Sequence[nn.Module]) -> bool:
    """True where all experts' layers have 8-bit matmuls throughout and agree on their formats, and have no bias.

    Nor adapters, which are added where a layer is called.
    """
    layers = [layer for expert in experts for layer in expert.children()]
    settings = {(layer.gemms, layer.power_of_two) for layer in layers if isinstance(layer, Float8Linear)}
    return (
        all(isinstance(layer, Float8Linear) and layer.bias is None and not hasattr(layer, "lora_A") for layer in layers)
        and len(settings) == 1
        and all(name in FP8_FORMATS for gemms, _ in settings for name in (gemms.fprop, gemms.dgrad, gemms.wgrad))
        and not any(gemms.tensorwise for gemms, _ in settings)  # one scale over all experts would be another format
    )


class ExpertRunner:
    """down(silu(gate(x)) * up(x)) of all experts, each on its own rows."""

    def fits(self, experts: Sequence[nn.Module]) -> bool:
        """Whether they agree now, as a switch at run time may have set them apart, and tensors have memory to cut."""
        return not in_func_transform() and groupable(experts)

    def __call__(self, rows: Sequence[Tensor], experts: Sequence[nn.Module]) -> list[Tensor]:
        """Rows of each expert [n, K] -> its result [n, K]."""
        counts = [len(x) for x in rows]
        x_PK = torch.cat([F.pad(x, (0, 0, 0, -len(x) % ROWS)) for x in rows])
        first = experts[0].gate_proj
        copies = _copies(x_PK, first)
        gate_PM = grouped_tile_linear(x_PK, counts, [expert.gate_proj for expert in experts], copies)
        up_PM = grouped_tile_linear(x_PK, counts, [expert.up_proj for expert in experts], copies)
        hidden = QuantizingSwiGLU(first.kernels, fp8_format(E4M3, ROW_TILE, power_of_two=first.power_of_two))(
            gate_PM, up_PM
        )
        copies = InputCopies(hidden.row, hidden.column)
        out_PK = grouped_tile_linear(hidden.value, counts, [expert.down_proj for expert in experts], copies)
        parts = out_PK.split([end - start for start, end in _spans(counts)])
        return [part[:count] for part, count in zip(parts, counts, strict=True)]


def grouped_tile_linear(
    x_PK: Tensor, counts: Sequence[int], layers: Sequence[Float8Linear], copies: InputCopies | None = None
) -> Tensor:
    """x W_e^T for each expert e on its rows.

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
    row, column = copies.row, copies.column
    if row is None:
        raise AssertionError("grouped layers have 8-bit matmuls throughout")
    qdata = (column.qdata, column.scale_inv) if column is not None else (None, None)
    return _GroupedMatmuls.apply(
        x_PK, row.qdata, row.scale_inv, *qdata, tuple(counts), tuple(layers), *[layer.weight for layer in layers]
    )


def _copies(x_PK: Tensor, first: Float8Linear) -> InputCopies:
    if first.kernels is None:
        raise AssertionError("convert gives each Float8Linear its kernels")
    return input_copies(x_PK, first.kernels, False, first.power_of_two, row=True, column=torch.is_grad_enabled())


def _spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    """First and last row of each expert, its padding included."""
    ends = list(accumulate(-(-count // ROWS) * ROWS for count in counts))
    return list(zip([0, *ends], ends, strict=False))


def _rows_of(tiled: TiledTensor, start: int, end: int) -> TiledTensor:
    return TiledTensor(tiled.qdata[start:end], tiled.scale_inv[start:end], tiled.tile, tiled.spec)


def _columns_of(tiled: TiledTensor, start: int, end: int) -> TiledTensor:
    """Columns of a matrix in row tiles; both ends are whole tiles."""
    scale_inv = tiled.scale_inv[:, start // ROWS : end // ROWS]
    return TiledTensor(tiled.qdata[:, start:end], scale_inv, tiled.tile, tiled.spec)


class _GroupedMatmuls(torch.autograd.Function):
    """The three matmuls of each expert."""

    @staticmethod
    def forward(ctx, x_PK, rowwise_qdata, row_scale, columnwise_qdata, column_scale, counts, layers, *weights_MK):
        kernels = layers[0].kernels
        row = TiledTensor(rowwise_qdata, row_scale, input_tile(tensorwise=False), E4M3)
        outs = []
        for layer, weight_MK, (start, end) in zip(layers, weights_MK, _spans(counts), strict=True):
            weight = layer.quantized_weight(weight_MK)
            layer.note_executed("fprop")
            outs.append(kernels.tile_gemm(_rows_of(row, start, end), weight, out_dtype=layers[0].output_dtype))
        ctx.save_for_backward(columnwise_qdata, column_scale, *weights_MK)
        ctx.counts, ctx.layers, ctx.x_dtype, ctx.gemms = counts, layers, x_PK.dtype, layers[0].gemms
        return torch.cat(outs)

    @staticmethod
    def backward(ctx, dy_PM):
        columnwise_qdata, column_scale, *weights_MK = ctx.saved_tensors
        first = ctx.layers[0]
        kernels, gemms = first.kernels, ctx.gemms
        x = TiledTensor(columnwise_qdata, column_scale, input_tile(tensorwise=False), E4M3)
        dgrad_spec, wgrad_spec = gradient_spec(gemms.dgrad), gradient_spec(gemms.wgrad)
        how = {"tensorwise": False, "power_of_two": first.power_of_two}
        row, column = quantize_copies(dy_PM, dgrad_spec, kernels, **how, row=True, column=True)
        if wgrad_spec != dgrad_spec:
            _, column = quantize_copies(dy_PM, wgrad_spec, kernels, **how, row=False, column=True)
        dx_parts, dweights = [], []
        for index, (start, end) in enumerate(_spans(ctx.counts)):
            weight = ctx.layers[index].quantized_weight(weights_MK[index])
            ctx.layers[index].note_executed("dgrad", "wgrad")
            dx_parts.append(kernels.tile_gemm(_rows_of(row, start, end), weight.transposed(), out_dtype=ctx.x_dtype))
            dy, inputs = _columns_of(column, start, end), _columns_of(x, start, end)
            dweights.append(kernels.tile_gemm(dy, inputs, out_dtype=ctx.layers[index].weight.dtype))
        dx, *dweights = first_order_only(torch.cat(dx_parts), *dweights, of=(dy_PM, *weights_MK))
        return dx, None, None, None, None, None, None, *dweights
