"""A frozen linear layer whose weight is kept in FP8 alone: one byte per weight, as fine-tuning with adapters wants it.

Forward multiplies the quantised input with the stored codes, backward the quantised output gradient with the same codes
transposed: FP8 in both directions, no weight gradient, nothing kept between the two. The codes never change, so nothing
is ever rounded twice. A policy may ask for other formats; the weight is then decoded in each pass. `lora` makes these
layers and puts adapters on them.

Legend: N tokens  K input features  M output features.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.formats.fp8_layout import CODE_DTYPE, from_stored, to_stored
from tilewright.formats.spec import SPECS
from tilewright.formats.tiled import FP8_BLOCK, TiledTensor
from tilewright.ops.base.code_modules import HoldsCodes
from tilewright.ops.base.transforms import in_func_transform
from tilewright.ops.kernels import Kernels
from tilewright.precision.float8.gemm.derivatives import NoForwardMode, first_order_only
from tilewright.precision.float8.gemm.input_cache import InputCopies, InputShare
from tilewright.precision.float8.gemm.operands import of_parts, parts_of
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.mixed.cast_layers import Cast, CastLinear
from tilewright.precision.policy.gemm_formats import FP8_TILE, TILES, GemmFormat, Gemms, Operands, named_format


class FrozenFloat8Linear(HoldsCodes, Cast, nn.Linear):
    """x W^T + b with a frozen FP8 weight. x [..., K] any float dtype -> [..., M] `output_dtype`, or x's dtype.

    Holds `weight` (float8_e4m3fn [M, K]) and `weight_scale_inv` (FP32, a scale a 128x128 block), as folders of
    DeepSeek-V3 do: entries of `state_dict`, neither parameters nor buffers. Made from a linear layer by
    `freeze_in_fp8`, in place.
    """

    code_attributes = MappingProxyType({"weight": "weight", "weight_scale_inv": "weight_scale_inv"})

    output_dtype: torch.dtype | None = None
    fprop: GemmFormat = FP8_TILE
    """Format of the forward matmul's operands."""
    dgrad: GemmFormat = FP8_TILE
    """Format of the operands of the input gradient's matmul."""
    power_of_two: bool = True
    """Kind of the inputs' and gradients' scales; the weight's are what they are."""
    kernels: Kernels | None = None
    share: InputShare | None = None
    """Where layers side by side find each other's quantised input."""
    plain_class: type[nn.Linear] = nn.Linear
    """The layer's class before."""

    def set_formats(self, compute: str, output: str, *, round_tf32: bool) -> None:
        """Set 16- or 32-bit matmuls of a frozen FP8 linear layer; see `Cast.set_formats`. TF32 is not emulated for a
        weight of 3 bits: FP32."""
        self.fprop = self.dgrad = named_format("fp32" if compute == "tf32" else compute)
        self.output_dtype = SPECS[output].dtype

    def set_gemms(self, gemms: Gemms, *, power_of_two: bool) -> None:
        """Set the formats of a frozen FP8 linear layer's matmuls; the weight keeps its scales.

        Raises:
            ConfigError: weights in another format than E4M3 with block scales, which the stored one has.
        """
        self.check_gemms(gemms)
        self.power_of_two = power_of_two
        self.fprop, self.dgrad = (each.relaxed(power_of_two=power_of_two) for each in (gemms.fprop, gemms.dgrad))

    @staticmethod
    def check_gemms(gemms: Gemms) -> None:
        """Raise where a frozen weight cannot be multiplied so; see `set_gemms`."""
        if gemms.operands is not None and gemms.operands.weight != FP8_BLOCK:
            raise ConfigError(
                "Frozen FP8 weight without block scales",
                got=str(gemms),
                need="fp8_tile, fp8_hybrid, or a format of 16 or 32 bit",
                try_='precision.mode = "fp8_tile"',
                where="precision.mode",
            )

    def forward(self, x: Tensor) -> Tensor:
        return self._no_autocast(self._run, x)

    def _run(self, x: Tensor) -> Tensor:
        # Inside of a torch.func transform the GEMM quantises what it reads: here tensors may have no memory.
        row = self._quantized_input(x) if self.fprop.scaled and not in_func_transform() else None
        matmuls = _FrozenMatmuls if torch.compiler.is_compiling() else _EagerFrozenMatmuls
        out_NM = matmuls.apply(
            x.reshape(-1, x.shape[-1]), *parts_of(row), self.weight, self.weight_scale_inv, self.bias,
            self.fprop, self.dgrad, self.kernels, self.output_dtype or x.dtype,
        )  # fmt: skip
        return out_NM.view(*x.shape[:-1], out_NM.shape[-1])

    def _quantized_input(self, x: Tensor) -> TiledTensor | None:
        kernels, form = self.kernels, self._forms().input
        if kernels is None:
            raise AssertionError("freeze_in_fp8 gives each layer its kernels")

        def make() -> InputCopies:
            x_NK = x.detach().reshape(-1, x.shape[-1])
            return InputCopies(kernels.quantize(x_NK, form), None)

        return make().row if self.share is None else self.share.copies_of(x, ("frozen", form), make).row

    def _forms(self) -> Operands:
        return self.fprop.operands or TILES

    def tiled_weight(self) -> TiledTensor:
        """Codes and scales of a frozen FP8 linear layer, [M, K]."""
        return from_stored(self.weight, self.weight_scale_inv)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """Moves a frozen FP8 linear layer's codes and scales with the model; `model.bfloat16()` leaves their dtypes
        alone."""
        qdata, scale_inv = self.weight, self.weight_scale_inv
        super()._apply(fn, recurse)
        if self.weight.dtype != CODE_DTYPE:
            self.weight = qdata.to(self.weight.device)
        if self.weight_scale_inv.dtype != torch.float32:
            self.weight_scale_inv = scale_inv.to(self.weight_scale_inv.device)
        return self

    def extra_repr(self) -> str:
        """Describe a frozen FP8 linear layer for print: nn.Linear's own text and the formats."""
        return f"{nn.Linear.extra_repr(self)}, frozen in fp8, fprop={self.fprop}, dgrad={self.dgrad}"


@torch.no_grad()
def freeze_in_fp8(module: nn.Linear, kernels: Kernels, coded: tuple[Tensor, Tensor] | None = None) -> None:
    """Turn a linear layer into an `FrozenFloat8Linear`, in place; on the meta device into the shapes of one.

    Args:
        module: a layer whose weight is a parameter.
        kernels: implementations.
        coded: codes and scales of the weight, of another layer that shares it.

    Example:
        >>> layer = nn.Linear(200, 3)
        >>> freeze_in_fp8(layer, Kernels.default())
        >>> layer.weight.dtype, list(layer.weight_scale_inv.shape), layer(torch.ones(2, 200)).shape
        (torch.float8_e4m3fn, [1, 2], torch.Size([2, 3]))
    """
    qdata, scale_inv = coded or to_stored(module.weight)
    if isinstance(module, Float8Linear):
        module.keep_weight(False)
    del module.weight
    if module.bias is not None:
        module.bias.requires_grad_(False)
    plain, frozen = type(module), cast(Any, module)
    frozen.__class__ = FrozenFloat8Linear
    frozen.plain_class, frozen.kernels = plain, kernels
    frozen.weight, frozen.weight_scale_inv = qdata, scale_inv


@torch.no_grad()
def thaw(module: FrozenFloat8Linear, weight_MK: Tensor) -> None:
    """Turn a `FrozenFloat8Linear` back into the layer that it was, with this weight as its parameter, still frozen."""
    del module.weight, module.weight_scale_inv
    plain = module.plain_class
    if plain is nn.Linear and "output_dtype" in vars(module):  # converted meanwhile: it must stay so
        plain = Float8Linear if module.fprop.scaled else CastLinear
        if not module.fprop.scaled:
            module.compute_dtype = module.fprop.dtype
    cast(Any, module).__class__ = plain
    if isinstance(module, Float8Linear) and "fprop" in vars(module):
        module.configure(Gemms(module.fprop, module.dgrad, module.fprop), power_of_two=module.power_of_two)
    for name in ("plain_class", "fprop", "dgrad"):
        vars(module).pop(name, None)
    module.register_parameter("weight", nn.Parameter(weight_MK, requires_grad=False))


class _FrozenMatmuls(torch.autograd.Function):
    """Forward GEMM and input gradient. FP8 data and scales are the layer's own buffers, kept by reference."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x_NK, row_qdata, row_scale, row_second, qdata_MK, scale_inv, bias_M, fprop, dgrad, kernels, out_dtype,
    ):  # fmt: skip
        weight = from_stored(qdata_MK, scale_inv)
        if fprop.scaled:
            row = of_parts(fprop.operands.input, (row_qdata, row_scale, row_second))
            if row is None:
                row = kernels.quantize(x_NK, fprop.operands.input)
            return kernels.tile_gemm(row, weight, bias_M, out_dtype=out_dtype)
        dtype = fprop.dtype
        bias = None if bias_M is None else bias_M.to(dtype)
        return kernels.linear(x_NK.to(dtype), weight.dequantize(dtype), bias).to(out_dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x_NK, _, _, _, qdata_MK, scale_inv, _, _, dgrad, kernels, _ = inputs
        ctx.save_for_backward(qdata_MK, scale_inv)
        ctx.dgrad, ctx.kernels, ctx.x_dtype = dgrad, kernels, x_NK.dtype

    @staticmethod
    def backward(ctx, dy_NM):
        qdata_MK, scale_inv = ctx.saved_tensors
        dx_NK = None
        if ctx.needs_input_grad[0]:
            weight = from_stored(qdata_MK, scale_inv).transposed()
            with torch.no_grad():
                if ctx.dgrad.scaled:
                    dy = ctx.kernels.quantize(dy_NM, ctx.dgrad.operands.gradient)
                    dx_NK = ctx.kernels.tile_gemm(dy, weight, out_dtype=ctx.x_dtype)
                else:
                    dtype = ctx.dgrad.dtype
                    dx_NK = ctx.kernels.linear(dy_NM.to(dtype), weight.dequantize(dtype)).to(ctx.x_dtype)
        return *first_order_only(dx_NK, of=(dy_NM,)), *[None] * 10


class _EagerFrozenMatmuls(NoForwardMode, _FrozenMatmuls): ...
