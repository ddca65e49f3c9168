"""Causal document attention in BF16 on AMX tiles, by a library in C++: nothing of S x S is ever in memory.

Legend: B batch, H query heads, K key heads, S positions, D width.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewright.core.hardware import Machine
from tilewright.ops.backends.attention_parts import padded_values
from tilewright.ops.backends.cpu import amx
from tilewright.ops.backends.cpu.build import ATTENTION
from tilewright.ops.backends.native.varlen_availability import NO_WINDOW, WINDOW
from tilewright.ops.backends.ref.math import score_scale
from tilewright.ops.base.dispatch import Case


def why_not(machine: Machine, case: Case) -> str | None:
    """The `why_not` of `attention`. Builds the library where it is not there yet (seconds)."""
    if case.device_type == "cpu" and case.kind not in NO_WINDOW.kinds:
        return f"it knows {NO_WINDOW.what}"
    return amx.why_not(ATTENTION, machine, case)


def attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    segments_BS: Tensor | None = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
) -> Tensor:
    """Attention: see `ops.attention`. It goes by blocks of its own: `block` changes nothing."""
    NO_WINDOW.check(WINDOW if window else "")
    scale = score_scale(q_BHSD, scale)
    v = padded_values(q_BHSD, v_BKSD)
    segments = None if segments_BS is None else segments_BS.to(torch.int32)
    out = _Attention.apply(q_BHSD, k_BKSD, v, segments, scale)
    return out if v is v_BKSD else out[..., : v_BKSD.shape[-1]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHSD, k_BKSD, v_BKSD, segments_BS, scale):
        out_BHSD, lse_BHS = _forward(q_BHSD, k_BKSD, v_BKSD, segments_BS, scale)
        ctx.save_for_backward(q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS, segments_BS)
        ctx.scale = scale
        return out_BHSD

    @staticmethod
    def backward(ctx, dout_BHSD):
        q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS, segments_BS = ctx.saved_tensors
        return *_backward(q_BHSD, k_BKSD, v_BKSD, segments_BS, out_BHSD, lse_BHS, dout_BHSD, ctx.scale), None, None


@torch.library.custom_op("tilewright::amx_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Result, and log-sum-exp of the scores in FP32 [B, H, S]."""
    q, k, v = (_rows(x) for x in (q, k, v))
    segments = None if segments is None else segments.contiguous()
    out, lse = _heads_inside(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _call(amx.functions(ATTENTION).tw_attention, (q, k, v, out), lse, segments, (), q, k, scale)
    return out, lse


@_forward.register_fake
def _(q, k, v, segments, scale):
    return _heads_inside(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tilewright::amx_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, dout = (_rows(x) for x in (q, k, v, out, dout))
    segments = None if segments is None else segments.contiguous()
    dq, dk, dv = (_heads_inside(x) for x in (q, k, v))
    function = amx.functions(ATTENTION).tw_attention_backward
    _call(function, (q, k, v, out), lse.contiguous(), segments, (dout, dq, dk, dv), q, k, scale)
    return dq, dk, dv


@_backward.register_fake
def _(q, k, v, segments, out, lse, dout, scale):
    return _heads_inside(q), _heads_inside(k), _heads_inside(v)


def _rows(x_BHSD: Tensor) -> Tensor:
    if x_BHSD.dtype != torch.bfloat16:
        raise TypeError(f"BF16 is needed, not {x_BHSD.dtype}")
    return x_BHSD if x_BHSD.stride(-1) == 1 else x_BHSD.contiguous()


def _heads_inside(x_BHSD: Tensor) -> Tensor:
    """An empty tensor of the same shape, [B, S, H, D] in memory: what the projections beside attention take."""
    batch, heads, positions, width = x_BHSD.shape
    return x_BHSD.new_empty((batch, positions, heads, width)).transpose(1, 2)


def _call(
    function: Callable[..., int], operands: Sequence[Tensor], lse: Tensor, segments: Tensor | None,
    more: Sequence[Tensor], q: Tensor, k: Tensor, scale: float,
) -> None:  # fmt: skip
    pointers = [x.data_ptr() for x in (*operands, lse)]
    pointers += [None if segments is None else segments.data_ptr(), *(x.data_ptr() for x in more)]
    strides = [x.stride(i) for x in (*operands, *more) for i in range(3)]
    batch, heads, positions, width = q.shape
    sizes = (batch, heads, k.shape[1], positions, width)
    if function(
        (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(strides))(*strides),
        (ctypes.c_int64 * len(sizes))(*sizes), scale, torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError("no memory to pack the operands of attention")
