"""A linear layer whose three products have formats of their own, 8-bit tiles among them.

What it keeps for backward is one byte an element: the column-wise copy of its input that the weight's gradient reads.
An input is quantised once for the layers that share it. A weight is quantised once an optimizer step where `weights`
manages it, else in each pass; the input's gradient reads the same codes transposed.
Read `tile_linear` first, then `_TileProducts`. Called by models through `convert`.

See: DeepSeek-V3 report, section 3.3 (fine-grained quantisation; FP8 copies of inputs cached for backward).

Legend: N tokens  K input features  M output features. TiledTensors carry their own shapes.
"""

import torch
from torch import Tensor, nn

from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE, Tile
from tilewright.formats.spec import E4M3, E5M2, SPECS, FloatSpec
from tilewright.formats.tiled import TiledTensor, WithCopies
from tilewright.ops.kernels import Kernels
from tilewright.precision.cast import Cast
from tilewright.precision.gemms import FP8_FORMATS, Gemms
from tilewright.precision.input_share import InputCopies, InputShare


class TileLinear(Cast, nn.Linear):
    """x W^T + b with the formats of `gemms`. x [..., K] any float dtype -> [..., M] `output_dtype`.

    Made from an `nn.Linear` by `convert`, in place; parameters stay what they were.
    """

    gemms: Gemms = Gemms.all("bf16")
    power_of_two: bool = True
    kernels: Kernels | None = None
    share: InputShare | None = None
    """Where layers side by side find each other's copies of the input. Set by `convert`."""
    weight_codes: Tensor | None
    """Codes [M, K] of the weight, where `weights.QuantizedWeights` keeps them; None: quantised in each pass."""
    weight_scale_inv: Tensor | None

    def set_gemms(self, gemms: Gemms, *, power_of_two: bool) -> None:
        """Set the formats of the products. Kept codes of the weight are forgotten where others are needed."""
        if "weight_codes" not in self._buffers or (gemms, power_of_two) != (self.gemms, self.power_of_two):
            self.store_weight(None)
        self.gemms = gemms
        self.power_of_two = power_of_two

    def store_weight(self, tiled: TiledTensor | None) -> None:
        """Keep these codes of the weight for the products to read, or none."""
        codes, scale_inv = (None, None) if tiled is None else (tiled.codes, tiled.scale_inv)
        self.register_buffer("weight_codes", codes, persistent=False)
        self.register_buffer("weight_scale_inv", scale_inv, persistent=False)

    def forward(self, x: Tensor | WithCopies) -> Tensor:
        if isinstance(x, WithCopies):
            return self._no_autocast(self._run, x.value, InputCopies(x.row, x.column))
        return self._no_autocast(self._run, x, None)

    def _run(self, x: Tensor, copies: InputCopies | None) -> Tensor:
        kernels = self.kernels
        if kernels is None:
            raise AssertionError("convert gives each TileLinear its kernels")
        x_NK = x.reshape(-1, x.shape[-1])
        wgrad = self.weight.requires_grad and torch.is_grad_enabled()

        def make() -> InputCopies:
            return input_copies(x_NK, self.gemms, kernels, self.power_of_two, wgrad=wgrad)

        if copies is None:
            key = (self.gemms, self.power_of_two, wgrad)
            copies = make() if self.share is None else self.share.copies_of(x, key, make)
        out_NM = tile_linear(
            x_NK, self.weight, self.bias, self.gemms, kernels, copies,
            stored=self.stored_weight(), power_of_two=self.power_of_two, out_dtype=self.output_dtype,
        )  # fmt: skip
        return out_NM.view(*x.shape[:-1], self.out_features)

    def stored_weight(self) -> TiledTensor | None:
        """The quantised weight that `weights.QuantizedWeights` keeps; None without it."""
        if self.weight_codes is None or self.weight_scale_inv is None:
            return None
        return TiledTensor(self.weight_codes, self.weight_scale_inv, weight_tile(self.gemms), E4M3)

    def quantized_weight(self) -> TiledTensor:
        """The weight as the products read it, quantised now."""
        if self.kernels is None:
            raise AssertionError("convert gives each TileLinear its kernels")
        return quantize_weight(self.weight.detach(), self.gemms, self.kernels, self.power_of_two)

    def extra_repr(self) -> str:
        """nn.Linear's own text and the formats."""
        return f"{nn.Linear.extra_repr(self)}, gemms={self.gemms}"


def weight_tile(gemms: Gemms) -> Tile:
    """Which elements of a weight share a scale."""
    return TENSORWISE if gemms.tensorwise else BLOCK_TILE


def input_tile(gemms: Gemms) -> Tile:
    """Which elements of an input or gradient, or of its transposed copy, share a scale."""
    return TENSORWISE if gemms.tensorwise else ROW_TILE


def gradient_spec(name: str) -> FloatSpec:
    """Format of the output gradient in a product of 8-bit operands."""
    return E4M3 if name == "fp8_tile" else E5M2


def quantize_weight(weight_MK: Tensor, gemms: Gemms, kernels: Kernels, power_of_two: bool) -> TiledTensor:
    """The weight in E4M3, in blocks of 128x128 or under one scale."""
    return kernels.quantize(weight_MK, E4M3, weight_tile(gemms), power_of_two=power_of_two)


def input_copies(x_NK: Tensor, gemms: Gemms, kernels: Kernels, power_of_two: bool, *, wgrad: bool) -> InputCopies:
    """The 8-bit copies of an input that the products of a layer need.

    Args:
        x_NK: [N, K].
        gemms: formats of the products.
        kernels: implementations.
        power_of_two: kind of scale.
        wgrad: whether a weight gradient will be computed.
    """
    wants_row, wants_column = gemms.fprop in FP8_FORMATS, wgrad and gemms.wgrad in FP8_FORMATS
    return InputCopies(
        *quantize_copies(x_NK.detach(), E4M3, gemms, kernels, power_of_two, row=wants_row, column=wants_column)
    )


def quantize_copies(
    x_NK: Tensor, spec: FloatSpec, gemms: Gemms, kernels: Kernels, power_of_two: bool, *, row: bool, column: bool
) -> tuple[TiledTensor | None, TiledTensor | None]:
    """The row-wise copy [N, K] and the transposed column-wise copy [K, N] of an input or gradient, as asked for."""
    if gemms.tensorwise:
        whole = kernels.quantize(x_NK, spec, TENSORWISE, power_of_two=power_of_two) if row or column else None
        return whole if row else None, whole.transposed() if whole is not None and column else None
    if column:
        both = kernels.quantize_both(x_NK, spec, power_of_two=power_of_two)
        return both[0] if row else None, both[1]
    return kernels.quantize(x_NK, spec, ROW_TILE, power_of_two=power_of_two) if row else None, None


def tile_linear(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None,
    gemms: Gemms,
    kernels: Kernels,
    copies: InputCopies | None = None,
    *,
    stored: TiledTensor | None = None,
    power_of_two: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x W^T + b and its gradients, each product in a format of its own.

    Args:
        x_NK: [N, K], any float dtype; also N = 0.
        weight_MK: [M, K], any float dtype; its gradient comes in that dtype, summed in FP32.
        bias_M: [M] or None.
        gemms: formats of the products.
        kernels: implementations.
        copies: 8-bit copies of x that another layer has made; None makes them here.
        stored: the quantised weight, [M, K]; None quantises `weight_MK` where it is needed.
        power_of_two: scales are powers of two.
        out_dtype: dtype of the result.

    Returns:
        [N, M] `out_dtype`.

    Example:
        >>> x, weight = torch.ones(3, 200), torch.ones(5, 200, requires_grad=True)
        >>> out = tile_linear(x, weight, None, Gemms.all("fp8_tile"), Kernels.default())
        >>> out.sum().backward()
        >>> out.shape, out[0, 0].item(), weight.grad[0, 0].item()
        (torch.Size([3, 5]), 200.0, 3.0)
    """
    if copies is None:
        wgrad = weight_MK.requires_grad and torch.is_grad_enabled()
        copies = input_copies(x_NK, gemms, kernels, power_of_two, wgrad=wgrad)
    row, column = copies.row, copies.column
    return _TileProducts.apply(
        x_NK, weight_MK, bias_M,
        None if row is None else row.codes, None if row is None else row.scale_inv,
        None if column is None else column.codes, None if column is None else column.scale_inv,
        None if stored is None else stored.codes, None if stored is None else stored.scale_inv,
        gemms, kernels, power_of_two, out_dtype,
    )  # fmt: skip


class _TileProducts(torch.autograd.Function):
    """The three products. Tensors of TiledTensors are passed one by one, as autograd and the compiler want them."""

    @staticmethod
    def forward(
        ctx, x_NK, weight_MK, bias_M, row_codes, row_scale, column_codes, column_scale,
        weight_codes, weight_scale, gemms, kernels, power_of_two, out_dtype,
    ):  # fmt: skip
        if gemms.fprop in FP8_FORMATS:
            if weight_codes is None:
                weight = quantize_weight(weight_MK, gemms, kernels, power_of_two)
            else:
                weight = TiledTensor(weight_codes, weight_scale, weight_tile(gemms), E4M3)
            row = TiledTensor(row_codes, row_scale, input_tile(gemms), E4M3)
            out_NM = kernels.tile_gemm(row, weight, bias_M, out_dtype=out_dtype)
        else:
            dtype = SPECS[gemms.fprop].dtype
            bias = None if bias_M is None else bias_M.to(dtype)
            out_NM = kernels.linear(x_NK.to(dtype), weight_MK.to(dtype), bias).to(out_dtype)
        keep = None
        if gemms.wgrad not in FP8_FORMATS and ctx.needs_input_grad[1]:
            keep = x_NK.to(SPECS[gemms.wgrad].dtype)
        if not ctx.needs_input_grad[1]:
            column_codes = column_scale = None
        ctx.save_for_backward(keep, column_codes, column_scale, weight_MK, weight_codes, weight_scale)
        ctx.gemms, ctx.kernels, ctx.power_of_two = gemms, kernels, power_of_two
        ctx.x_dtype, ctx.has_bias = x_NK.dtype, bias_M is not None
        ctx.bias_dtype = bias_M.dtype if bias_M is not None else None
        return out_NM

    @staticmethod
    def backward(ctx, dy_NM):
        keep, column_codes, column_scale, weight_MK, weight_codes, weight_scale = ctx.saved_tensors
        gemms, kernels = ctx.gemms, ctx.kernels
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if wants_dx and gemms.dgrad not in FP8_FORMATS:
            dtype = SPECS[gemms.dgrad].dtype
            dx = kernels.linear(dy_NM.to(dtype), weight_MK.to(dtype).T).to(ctx.x_dtype)
        if wants_dw and gemms.wgrad not in FP8_FORMATS:
            dy = dy_NM.to(SPECS[gemms.wgrad].dtype)
            dw = kernels.linear(dy.T, keep.T).to(weight_MK.dtype)
        dgrad8, wgrad8 = wants_dx and dx is None, wants_dw and dw is None
        dgrad_spec, wgrad_spec = gradient_spec(gemms.dgrad), gradient_spec(gemms.wgrad)
        if dgrad8 and wgrad8 and dgrad_spec != wgrad_spec:
            row, _ = quantize_copies(dy_NM, dgrad_spec, gemms, kernels, ctx.power_of_two, row=True, column=False)
            _, column = quantize_copies(dy_NM, wgrad_spec, gemms, kernels, ctx.power_of_two, row=False, column=True)
        else:
            spec = dgrad_spec if dgrad8 else wgrad_spec
            row, column = quantize_copies(dy_NM, spec, gemms, kernels, ctx.power_of_two, row=dgrad8, column=wgrad8)
        if row is not None:
            if weight_codes is None:
                weight = quantize_weight(weight_MK, gemms, kernels, ctx.power_of_two)
            else:
                weight = TiledTensor(weight_codes, weight_scale, weight_tile(gemms), E4M3)
            dx = kernels.tile_gemm(row, weight.transposed(), out_dtype=ctx.x_dtype)
        if column is not None:
            x = TiledTensor(column_codes, column_scale, input_tile(gemms), E4M3)
            dw = kernels.tile_gemm(column, x, out_dtype=weight_MK.dtype)
        if ctx.has_bias and wants_db:
            db = dy_NM.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, *[None] * 10
