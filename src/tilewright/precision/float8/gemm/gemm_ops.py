"""The three matmuls of a linear layer, in formats that are read when they run, and counted as they ran.

torch.compile sees two operators and does not look inside, so a change of formats compiles nothing again. `formats` [3]
and `counts` [3, formats] are int64 tensors on the host: index into `GEMM_FORMATS` by GEMM, and calls by GEMM and
format. 8-bit copies of the input that were made before come as arguments; what is missing is quantised here. Operators
take no Python objects, so implementations come as the text of `Kernels.spec`.

The operators write to `counts` and to a weight's store (`weight_store`) and do not declare it: neither changes a
result. Declared, torch.compile orders and copies graphs by them, and a compiled layer that runs twice before its
backward fails (torch 2.13: "modified by an inplace operation").
Read `matmuls` first.

Legend: N tokens  K input features  M output features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.formats.scaling import Tile
from tilewright.formats.spec import E4M3, SPECS
from tilewright.formats.tiled import TiledTensor, fp8_format
from tilewright.ops.kernels import Kernels, kernels_of
from tilewright.precision.float8.gemm.derivatives import NoForwardMode, first_order_only
from tilewright.precision.float8.gemm.input_cache import InputCopies
from tilewright.precision.float8.gemm.operands import gradient_spec, input_tile, quantize_copies, quantize_weight
from tilewright.precision.float8.gemm.weight_store import stored_weight
from tilewright.precision.policy.gemm_formats import FP8_FORMATS, GEMM_FORMATS, GEMM_NAMES

FPROP, DGRAD, WGRAD = range(3)
"""Rows of `formats` and `counts`, as in `GEMM_NAMES`."""


@dataclass(frozen=True)
class RuntimeFormats:
    """What a layer's matmuls are reported at run time and tell back. Both on the host, int64.

    `formats` [3]: index into `GEMM_FORMATS` of each matmul. `counts` [3, len(GEMM_FORMATS)]: calls so far.
    """

    formats: Tensor
    counts: Tensor


SWITCH_BYTES = 8 * len(GEMM_NAMES) * (1 + len(GEMM_FORMATS))
"""Bytes of a layer's `RuntimeFormats`, on the host."""


@dataclass(frozen=True)
class StaticConfig:
    """What is settled before a layer is compiled.

    `keep_value`: backward keeps the input itself, else its column-wise codes. `tensorwise`: 8-bit operands have one
    scale. `power_of_two`: kind of scale. `kernels`: a `Kernels.spec`.
    """

    keep_value: bool
    tensorwise: bool
    power_of_two: bool
    kernels: str
    out_dtype: torch.dtype


def matmuls(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None,
    copies: InputCopies,
    store: Tensor | None,
    switch: RuntimeFormats,
    fixed: StaticConfig,
) -> Tensor:
    """x W^T + b and its gradients, each matmul in the format that `switch` says when it runs.

    Args:
        x_NK: [N, K], any float dtype; also N = 0.
        weight_MK: [M, K], any float dtype.
        bias_M: [M] or None.
        copies: 8-bit copies of x that were made ahead; `column` must be there where codes are kept for backward.
        store: of `weight_store.new_store`, in which the quantised weight is kept; None quantises it in each pass.
        switch: formats and counts.
        fixed: everything else.

    Returns:
        [N, M] `fixed.out_dtype`.
    """
    row, column = _pair(copies.row), _pair(copies.column)
    run = _Float8Matmuls if torch.compiler.is_compiling() else _EagerFloat8Matmuls
    return run.apply(
        x_NK, weight_MK, bias_M, *row, *column, store, switch.formats, switch.counts,
        fixed.keep_value, fixed.tensorwise, fixed.power_of_two, fixed.out_dtype, fixed.kernels,
    )  # fmt: skip


def _pair(tiled: TiledTensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if tiled is None else (tiled.qdata, tiled.scale_inv)


class _Float8Matmuls(torch.autograd.Function):
    """Tensors of TiledTensors are passed one by one, as autograd and the compiler want them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x_NK, weight_MK, bias_M, rowwise_qdata, row_scale, columnwise_qdata, column_scale, store,
        formats, counts, keep_value, tensorwise, power_of_two, out_dtype, kernels,
    ):  # fmt: skip
        return _fprop(
            x_NK, weight_MK, bias_M, rowwise_qdata, row_scale, store, formats, counts,
            tensorwise, power_of_two, out_dtype, kernels,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        (
            x_NK, weight_MK, bias_M, _, _, columnwise_qdata, column_scale, store,
            formats, counts, keep_value, tensorwise, power_of_two, _, kernels,
        ) = inputs  # fmt: skip
        wants_dw = ctx.needs_input_grad[1]
        keeps_qdata = wants_dw and not keep_value
        ctx.save_for_backward(
            x_NK if wants_dw and keep_value else None,
            columnwise_qdata if keeps_qdata else None, column_scale if keeps_qdata else None,
            weight_MK, store,
        )  # fmt: skip
        # No saved tensors: a change of formats between forward and backward is no lost value.
        ctx.formats, ctx.counts = formats, counts
        ctx.tensorwise, ctx.power_of_two, ctx.kernels = tensorwise, power_of_two, kernels
        ctx.x_dtype = x_NK.dtype
        ctx.bias_dtype = None if bias_M is None else bias_M.dtype

    @staticmethod
    def backward(ctx, dy_NM):
        x_NK, columnwise_qdata, column_scale, weight_MK, store = ctx.saved_tensors
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with torch.no_grad():
            if wants_dx or wants_dw:
                dx, dw = _bprop(
                    dy_NM, x_NK, columnwise_qdata, column_scale, weight_MK, store, ctx.formats, ctx.counts,
                    ctx.tensorwise, ctx.power_of_two, ctx.x_dtype, wants_dx, wants_dw, ctx.kernels,
                )  # fmt: skip
            if ctx.bias_dtype is not None and wants_db:
                db = dy_NM.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        grads = first_order_only(dx if wants_dx else None, dw if wants_dw else None, db, of=(dy_NM, x_NK, weight_MK))
        return *grads, *[None] * 12


class _EagerFloat8Matmuls(NoForwardMode, _Float8Matmuls): ...


def _operator(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` as an operator: a function of the values of its arguments, `counts` and `store` left out."""
    torch.library.define(f"tilewright::{name}", torch.library.infer_schema(run, mutates_args=()))
    torch.library.impl(f"tilewright::{name}", "CompositeExplicitAutograd")(run)
    return getattr(torch.ops.tilewright, name).default


def _run_fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, rowwise_qdata: Tensor | None, row_scale: Tensor | None,
    store: Tensor | None, formats: Tensor, counts: Tensor,
    tensorwise: bool, power_of_two: bool, out_dtype: torch.dtype, kernels: str,
) -> Tensor:  # fmt: skip
    run = kernels_of(kernels)
    name = _count(FPROP, formats, counts)
    if name not in FP8_FORMATS:
        dtype = SPECS[name].dtype
        narrow_bias = None if bias is None else bias.to(dtype)
        return run.linear(x.to(dtype), weight.to(dtype), narrow_bias).to(out_dtype)
    row = _tiled(rowwise_qdata, row_scale, input_tile(tensorwise))
    if row is None:
        row = run.quantize(x, fp8_format(E4M3, input_tile(tensorwise), power_of_two=power_of_two))
    operand = _weight(run, weight, store, tensorwise, power_of_two)
    return run.tile_gemm(row, operand, bias, out_dtype=out_dtype)


_fprop = _operator("tile_fprop", _run_fprop)


@torch.library.register_fake("tilewright::tile_fprop")
def _(
    x, weight, bias, rowwise_qdata, row_scale, store, formats, counts,
    tensorwise, power_of_two, out_dtype, kernels,
):  # fmt: skip
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def _run_bprop(
    dy: Tensor, x: Tensor | None, columnwise_qdata: Tensor | None, column_scale: Tensor | None,
    weight: Tensor, store: Tensor | None, formats: Tensor, counts: Tensor,
    tensorwise: bool, power_of_two: bool, x_dtype: torch.dtype, wants_dx: bool, wants_dw: bool, kernels: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    run = kernels_of(kernels)
    dgrad = _count(DGRAD, formats, counts) if wants_dx else None
    wgrad = _count(WGRAD, formats, counts) if wants_dw else None
    row, column = _gradient_copies(run, dy, dgrad, wgrad, tensorwise, power_of_two)
    dx = dw = dy.new_empty(0)
    if row is not None:
        operand = _weight(run, weight, store, tensorwise, power_of_two)
        dx = run.tile_gemm(row, operand.transposed(), out_dtype=x_dtype)
    elif dgrad is not None:
        dtype = SPECS[dgrad].dtype
        dx = run.linear(dy.to(dtype), weight.to(dtype).T).to(x_dtype)
    if column is not None:
        inputs = _tiled(columnwise_qdata, column_scale, input_tile(tensorwise))
        if inputs is None:
            how = {"tensorwise": tensorwise, "power_of_two": power_of_two}
            _, inputs = quantize_copies(x, E4M3, run, **how, row=False, column=True)
        dw = run.tile_gemm(column, inputs, out_dtype=weight.dtype)
    elif wgrad is not None:
        dtype = SPECS[wgrad].dtype
        dw = run.linear(dy.to(dtype).T, x.to(dtype).T).to(weight.dtype)
    return dx if wants_dx else dy.new_empty(0), dw if wants_dw else dy.new_empty(0)


_bprop = _operator("tile_bprop", _run_bprop)


@torch.library.register_fake("tilewright::tile_bprop")
def _(
    dy, x, columnwise_qdata, column_scale, weight, store, formats, counts,
    tensorwise, power_of_two, x_dtype, wants_dx, wants_dw, kernels,
):  # fmt: skip
    dx = dy.new_empty((dy.shape[0], weight.shape[1]) if wants_dx else (0,), dtype=x_dtype if wants_dx else dy.dtype)
    dw = dy.new_empty(weight.shape if wants_dw else (0,), dtype=weight.dtype if wants_dw else dy.dtype)
    return dx, dw


def _count(matmul: int, formats: Tensor, counts: Tensor) -> str:
    """The format of a matmul, noted as run."""
    index = formats.tolist()[matmul]
    counts.numpy()[matmul, index] += 1  # the same memory, in a tenth of the time of indexing a tensor
    return GEMM_FORMATS[index]


def _gradient_copies(
    run: Kernels, dy: Tensor, dgrad: str | None, wgrad: str | None, tensorwise: bool, power_of_two: bool
) -> tuple[TiledTensor | None, TiledTensor | None]:
    """The output gradient for those of the two matmuls that have 8-bit operands: row-wise, and transposed."""
    how = {"tensorwise": tensorwise, "power_of_two": power_of_two}
    dgrad8, wgrad8 = dgrad in FP8_FORMATS, wgrad in FP8_FORMATS
    if dgrad8 and wgrad8 and gradient_spec(dgrad) != gradient_spec(wgrad):
        row, _ = quantize_copies(dy, gradient_spec(dgrad), run, **how, row=True, column=False)
        _, column = quantize_copies(dy, gradient_spec(wgrad), run, **how, row=False, column=True)
        return row, column
    name = dgrad if dgrad8 else wgrad
    return quantize_copies(dy, gradient_spec(name or ""), run, **how, row=dgrad8, column=wgrad8)


def _weight(run: Kernels, weight: Tensor, store: Tensor | None, tensorwise: bool, power_of_two: bool) -> TiledTensor:
    """The FP8 data of a weight as it is now."""
    how = {"tensorwise": tensorwise, "power_of_two": power_of_two}
    return quantize_weight(weight, run, **how) if store is None else stored_weight(store, weight, run, **how)


def _tiled(qdata: Tensor | None, scale: Tensor | None, tile: Tile) -> TiledTensor | None:
    return None if qdata is None or scale is None else TiledTensor(qdata, scale, tile, E4M3)
