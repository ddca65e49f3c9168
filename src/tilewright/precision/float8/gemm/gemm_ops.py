"""The three matmuls of a linear layer, in formats that are read when they run, and counted as they ran.

torch.compile sees two operators and does not look inside, so a change of formats compiles nothing again. `formats` [3]
and `counts` [3, known] are int64 tensors on the host: index into the formats that the layer knows by GEMM, and calls by
GEMM and format. Copies of the input that were made before come as arguments; what is missing is quantised here.
Operators take no Python objects, so implementations come as the text of `Kernels.spec`, and the formats that the layer
knows as that of `gemm_formats.to_text`.

The operators write to `counts` and to a weight's store (`weight_store`) and do not declare it: neither changes a
result. Declared, torch.compile orders and copies graphs by them, and a compiled layer that runs twice before its
backward fails (torch 2.13: "modified by an inplace operation").
Read `matmuls` first.

Legend: N tokens  K input features  M output features.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.formats.tiled import TiledTensor
from tilewright.ops.base.weight_gradient_queue import Waiting, WeightGradientQueue
from tilewright.ops.kernels import Kernels, kernels_of
from tilewright.precision.float8.gemm.derivatives import NoForwardMode, first_order_only
from tilewright.precision.float8.gemm.input_cache import InputCopies
from tilewright.precision.float8.gemm.operands import Parts, of_parts, parts_of, quantize_copies, tile_wgrad
from tilewright.precision.float8.gemm.weight_store import weight_operand
from tilewright.precision.policy.gemm_formats import GEMM_FORMATS, GEMM_NAMES, GemmFormat, of_text

FPROP, DGRAD, WGRAD = range(3)
"""Rows of `formats` and `counts`, as in `GEMM_NAMES`."""


@dataclass(frozen=True)
class RuntimeFormats:
    """The run-time state of a layer's matmuls: formats in, counts of calls out. Both on the host, int64.

    `known`: the formats that there are, as text. `formats` [3]: index into them of each matmul. `counts` [3, known]:
    calls so far.
    """

    known: str
    formats: Tensor
    counts: Tensor

    def after(self, before: "RuntimeFormats") -> "RuntimeFormats":
        """Run-time formats of GEMMs with the counts of `before`: in its own tensors, where both know the same
        formats."""
        names, had = ([each.name for each in of_text(known)] for known in (self.known, before.known))
        if names == had:
            before.formats.copy_(self.formats)
            return replace(before, known=self.known)
        for name in set(names).intersection(had):
            self.counts[:, names.index(name)] = before.counts[:, had.index(name)]
        return self

    def executed(self) -> dict[str, dict[str, int]]:
        """Count the calls of executed GEMMs: matmul -> format -> calls so far, for formats that ran."""
        names = [each.name for each in of_text(self.known)]
        return {
            gemm: {name: count for name, count in zip(names, row, strict=True) if count}
            for gemm, row in zip(GEMM_NAMES, self.counts.tolist(), strict=True)
        }


SWITCH_BYTES = 8 * len(GEMM_NAMES) * (1 + len(GEMM_FORMATS))
"""Bytes of a layer's `RuntimeFormats`, on the host, of the formats that recipes name."""


@dataclass(frozen=True)
class StaticConfig:
    """Choices that are settled before a layer is compiled.

    `keep_value`: backward keeps the input itself, else its column-wise codes. `kernels`: a `Kernels.spec`.
    """

    keep_value: bool
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
    queue: WeightGradientQueue | None = None,
) -> Tensor:
    """Run the three GEMMs of a linear layer: x W^T + b and its gradients, each in the format that `switch` says when it
    runs.

    Args:
        x_NK: [N, K], any float dtype; also N = 0.
        weight_MK: [M, K], any float dtype.
        bias_M: [M] or None.
        copies: 8-bit copies of x that were made ahead; `column` must be there where codes are kept for backward.
        store: of `weight_store.new_store`, in which the quantised weight is kept; None quantises it in each pass.
        switch: formats and counts.
        fixed: everything else.
        queue: where the weight's gradient may wait, its operands quantised as it will read them. Outside of compiled
            code and of `torch.func` transforms.

    Returns:
        [N, M] `fixed.out_dtype`.
    """
    row, column = parts_of(copies.row), parts_of(copies.column)
    run = _Float8Matmuls if torch.compiler.is_compiling() else _EagerFloat8Matmuls
    return run.apply(
        x_NK, weight_MK, bias_M, *row, *column, store, switch.formats, switch.counts, switch.known,
        fixed.keep_value, fixed.out_dtype, fixed.kernels, queue, copies.arrive,
    )  # fmt: skip


class _Float8Matmuls(torch.autograd.Function):
    """Tensors of TiledTensors are passed one by one, as autograd and the compiler want them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x_NK, weight_MK, bias_M, row_qdata, row_scale, row_second, column_qdata, column_scale, column_second, store,
        formats, counts, known, keep_value, out_dtype, kernels, queue, arrive,
    ):  # fmt: skip
        return _fprop(
            x_NK, weight_MK, bias_M, row_qdata, row_scale, row_second, store, formats, counts,
            known, out_dtype, kernels,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        (
            x_NK, weight_MK, bias_M, _, _, _, *column, store,
            formats, counts, known, keep_value, _, kernels, ctx.queue, ctx.arrive,
        ) = inputs  # fmt: skip
        wants_dw = ctx.needs_input_grad[1]
        keeps_qdata = wants_dw and not keep_value
        ctx.save_for_backward(
            x_NK if wants_dw and keep_value else None,
            *(column if keeps_qdata else (None, None, None)),
            weight_MK, store,
        )  # fmt: skip
        # No saved tensors: a change of formats between forward and backward is no lost value.
        ctx.formats, ctx.counts = formats, counts
        ctx.known, ctx.kernels = known, kernels
        ctx.x_dtype = x_NK.dtype
        ctx.bias_dtype = None if bias_M is None else bias_M.dtype
        if ctx.queue is not None:  # recomputation hands out what it saves as tensors of their own
            ctx.weight = weight_MK

    @staticmethod
    def backward(ctx, dy_NM):
        x_NK, *column, weight_MK, store = ctx.saved_tensors
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with torch.no_grad():
            if wants_dx or wants_dw:
                if wants_dw and ctx.arrive is not None:
                    column = ctx.arrive(tuple(column))
                qdata, scale_inv, second = column
                given = (
                    dy_NM, x_NK, qdata, scale_inv, second, weight_MK, store, ctx.formats, ctx.counts,
                    ctx.known, ctx.x_dtype, wants_dx, wants_dw, ctx.kernels,
                )  # fmt: skip
                if wants_dw and ctx.queue is not None and ctx.queue.takes(ctx.weight):
                    dx, waiting = _backward(*given)
                    ctx.queue.add(ctx.weight, waiting)
                else:
                    dx, dw = _bprop(*given)
            if ctx.bias_dtype is not None and wants_db:
                db = dy_NM.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        grads = first_order_only(dx if wants_dx else None, dw if wants_dw else None, db, of=(dy_NM, x_NK, weight_MK))
        return *grads, *[None] * 15


class _EagerFloat8Matmuls(NoForwardMode, _Float8Matmuls): ...


def _operator(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A GEMM's `run` as an operator: a function of the values of its arguments, `counts` and `store` left out."""
    torch.library.define(f"tilewright::{name}", torch.library.infer_schema(run, mutates_args=()))
    torch.library.impl(f"tilewright::{name}", "CompositeExplicitAutograd")(run)
    return getattr(torch.ops.tilewright, name).default


def _run_fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    row_qdata: Tensor | None, row_scale: Tensor | None, row_second: Tensor | None,
    store: Tensor | None, formats: Tensor, counts: Tensor, known: str, out_dtype: torch.dtype, kernels: str,
) -> Tensor:  # fmt: skip
    run = kernels_of(kernels)
    found = _count(FPROP, formats, counts, known)
    if found.operands is None:
        narrow_bias = None if bias is None else bias.to(found.dtype)
        return run.linear(x.to(found.dtype), weight.to(found.dtype), narrow_bias).to(out_dtype)
    row = of_parts(found.operands.input, (row_qdata, row_scale, row_second))
    if row is None:
        row = run.quantize(x, found.operands.input)
    operand = weight_operand(store, weight, run, found.operands.weight)
    return run.tile_gemm(row, operand, bias, out_dtype=out_dtype)


_fprop = _operator("tile_fprop", _run_fprop)


@torch.library.register_fake("tilewright::tile_fprop")
def _(
    x, weight, bias, row_qdata, row_scale, row_second, store, formats, counts, known, out_dtype, kernels,
):  # fmt: skip
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def _run_bprop(
    dy: Tensor, x: Tensor | None,
    column_qdata: Tensor | None, column_scale: Tensor | None, column_second: Tensor | None,
    weight: Tensor, store: Tensor | None, formats: Tensor, counts: Tensor,
    known: str, x_dtype: torch.dtype, wants_dx: bool, wants_dw: bool, kernels: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    column = column_qdata, column_scale, column_second
    dx, waiting = _backward(dy, x, *column, weight, store, formats, counts, known, x_dtype, wants_dx, wants_dw, kernels)
    nothing = dy.new_empty(0)
    return nothing if dx is None else dx, nothing if waiting is None else waiting.compute()


def _backward(
    dy: Tensor, x: Tensor | None,
    column_qdata: Tensor | None, column_scale: Tensor | None, column_second: Tensor | None,
    weight: Tensor, store: Tensor | None, formats: Tensor, counts: Tensor,
    known: str, x_dtype: torch.dtype, wants_dx: bool, wants_dw: bool, kernels: str,
) -> tuple[Tensor | None, Waiting | None]:  # fmt: skip
    """Run the GEMMs of backward: the input's gradient, and the weight's with its operands as they are multiplied."""
    run = kernels_of(kernels)
    dgrad = _count(DGRAD, formats, counts, known) if wants_dx else None
    wgrad = _count(WGRAD, formats, counts, known) if wants_dw else None
    row, column = _gradient_copies(run, dy, dgrad, wgrad)
    dx = waiting = None
    if dgrad is not None:
        dx = _input_gradient(run, dy, row, weight, store, dgrad, x_dtype)
    if wgrad is not None:
        kept = column_qdata, column_scale, column_second
        waiting = _weight_gradient(run, dy, column, x, kept, wgrad, weight.dtype)
    return dx, waiting


def _input_gradient(
    run: Kernels, dy: Tensor, row: TiledTensor | None, weight: Tensor, store: Tensor | None,
    form: GemmFormat, x_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if row is None or form.operands is None:
        return run.linear(dy.to(form.dtype), weight.to(form.dtype).T).to(x_dtype)
    operand = weight_operand(store, weight, run, form.operands.weight, transposed=True)
    return run.tile_gemm(row, operand, out_dtype=x_dtype)


def _weight_gradient(
    run: Kernels, dy: Tensor, column: TiledTensor | None, x: Tensor | None, kept: Parts,
    form: GemmFormat, dtype: torch.dtype,
) -> Waiting:  # fmt: skip
    inputs = None if form.operands is None else of_parts(form.operands.input, kept)
    if inputs is None and x is None:
        raise AssertionError("backward keeps the input or its codes")
    if column is None or form.operands is None:
        assert x is not None, "its codes are of no use here"
        dy_NM, x_NK = dy.to(form.dtype), x.to(form.dtype)
        return Waiting(lambda: run.linear(dy_NM.T, x_NK.T).to(dtype), (dy_NM, x_NK))
    if inputs is None:
        assert x is not None, "see above"
        _, inputs = quantize_copies(x, form.operands.input, run, row=False, column=True)
        assert inputs is not None, "it was asked for"
    return tile_wgrad(run, column, inputs, dtype)


_bprop = _operator("tile_bprop", _run_bprop)


@torch.library.register_fake("tilewright::tile_bprop")
def _(
    dy, x, column_qdata, column_scale, column_second, weight, store, formats, counts,
    known, x_dtype, wants_dx, wants_dw, kernels,
):  # fmt: skip
    dx = dy.new_empty((dy.shape[0], weight.shape[1]) if wants_dx else (0,), dtype=x_dtype if wants_dx else dy.dtype)
    dw = dy.new_empty(weight.shape if wants_dw else (0,), dtype=weight.dtype if wants_dw else dy.dtype)
    return dx, dw


def _count(matmul: int, formats: Tensor, counts: Tensor, known: str) -> GemmFormat:
    """Count a GEMM: its format, noted as run."""
    index = formats.tolist()[matmul]
    counts.numpy()[matmul, index] += 1  # the same memory, in a tenth of the time of indexing a tensor
    return of_text(known)[index]


def _gradient_copies(
    run: Kernels, dy: Tensor, dgrad: GemmFormat | None, wgrad: GemmFormat | None
) -> tuple[TiledTensor | None, TiledTensor | None]:
    """Quantise the output gradient for those of the two GEMMs of backward that have operands with scales: row-wise, and
    transposed."""
    for_row = None if dgrad is None or dgrad.operands is None else dgrad.operands.gradient
    for_column = None if wgrad is None or wgrad.operands is None else wgrad.operands.gradient
    if for_row is not None and for_column is not None and for_row != for_column:
        row, _ = quantize_copies(dy, for_row, run, row=True, column=False)
        _, column = quantize_copies(dy, for_column, run, row=False, column=True)
        return row, column
    form = for_row or for_column
    if form is None:
        return None, None
    return quantize_copies(dy, form, run, row=for_row is not None, column=for_column is not None)
