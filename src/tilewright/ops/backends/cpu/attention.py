"""Causal document attention of BF16 operands by a library in C++: nothing of S x S is ever in memory.

One file, built twice: products on AMX tiles, or by AVX-512's BF16 instruction.

Legend: B batch, H query heads, K key heads, S positions, D width.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewright.core.hardware import Machine
from tilewright.ops.backends.attention_parts import added_mask, expand, first_keys, padded_values
from tilewright.ops.backends.cpu import amx
from tilewright.ops.backends.cpu.addresses import address
from tilewright.ops.backends.cpu.build import AMX_ATTENTION, AVX512_ATTENTION
from tilewright.ops.backends.ref.math import score_scale
from tilewright.ops.base.dispatch import Case


def why_not_amx(machine: Machine, case: Case) -> str | None:
    """The `why_not` of attention `by_amx` on a CPU. Builds the library where it is not there yet (seconds)."""
    return amx.why_not(AMX_ATTENTION, machine, case)


def why_not_avx512(machine: Machine, case: Case) -> str | None:
    """The `why_not` of attention `by_avx512` on a CPU. Builds the library where it is not there yet (seconds)."""
    if case.device_type != "cpu" or case.dtype != torch.bfloat16:
        return "it is for BF16 on CPUs"
    if "avx512_bf16" not in machine.cpu_features:
        return "the CPU has no AVX-512 instructions for BF16, or torch may not use them"
    return AVX512_ATTENTION.why_not(machine, case)


def attention(
    kernel: str,
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    segments_BS: Tensor | None = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
) -> Tensor:
    """Compute attention on a CPU in C++: see `ops.attention`. It uses blocks of its own: `block` changes nothing.

    Args:
        kernel: "amx" or "avx512".
        q_BHSD, k_BKSD, v_BKSD, segments_BS, scale, block, window: as there.
    """
    scale = score_scale(q_BHSD, scale)
    v = padded_values(q_BHSD, v_BKSD)
    out = _Attention.apply(q_BHSD, k_BKSD, v, segments_BS, scale, window, kernel)
    return out if v is v_BKSD else out[..., : v_BKSD.shape[-1]]


by_amx = functools.partial(attention, "amx")
"""`attention` on AMX tiles."""
by_avx512 = functools.partial(attention, "avx512")
"""`attention` by AVX-512's BF16 instruction."""


def masked_attention(
    kernel: str, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Masked attention on a CPU in C++, where a mask says what each query sees. Of a mask of documents or windows,
    where a query sees all keys from a first one up to itself, it is `attention`; any other goes to torch's flash
    kernel.

    Args:
        kernel: "amx" or "avx512".
        q_BHSD, k_BKSD, v_BKSD: in BF16.
        mask: boolean, [1 or B, 1 or H, S, S]; true where a query sees a key.
        scale: of the scores.
    """
    v = padded_values(q_BHSD, v_BKSD)
    out = _MaskedAttention.apply(q_BHSD, k_BKSD, v, mask, score_scale(q_BHSD, scale), kernel)
    return out if v is v_BKSD else out[..., : v_BKSD.shape[-1]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHSD, k_BKSD, v_BKSD, segments_BS, scale, window, kernel):
        out_BHSD, lse_BHS = _forward(q_BHSD, k_BKSD, v_BKSD, segments_BS, scale, window, kernel)
        ctx.save_for_backward(q_BHSD, k_BKSD, v_BKSD, segments_BS, out_BHSD, lse_BHS)
        ctx.options = scale, window, kernel
        return out_BHSD

    @staticmethod
    def backward(ctx, dout_BHSD):
        return *_backward(*ctx.saved_tensors, dout_BHSD, *ctx.options), None, None, None, None


@torch.library.custom_op("tilewright::bf16_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scale: float, window: int, kernel: str
) -> tuple[Tensor, Tensor]:
    """Run attention forward on a CPU: result, and log-sum-exp of the scores in FP32 [B, H, S]."""
    q, k, v = (_rows(x) for x in (q, k, v))
    out, lse = _heads_inside(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    function = _functions(kernel).tw_attention
    _call(function, (q, k, v, out), lse, first_keys(segments, q.shape[2], window), (), q, k, scale)
    return out, lse


@_forward.register_fake
def _(q, k, v, segments, scale, window, kernel):
    return _heads_inside(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tilewright::bf16_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, window: int, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, out, dout = (_rows(x) for x in (q, k, v, out, dout))
    dq, dk, dv = (_heads_inside(x) for x in (q, k, v))
    function, first = _functions(kernel).tw_attention_backward, first_keys(segments, q.shape[2], window)
    _call(function, (q, k, v, out), lse.contiguous(), first, (dout, dq, dk, dv), q, k, scale)
    return dq, dk, dv


@_backward.register_fake
def _(q, k, v, segments, out, lse, dout, scale, window, kernel):
    return _heads_inside(q), _heads_inside(k), _heads_inside(v)


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHSD, k_BKSD, v_BKSD, mask, scale, kernel):
        out_BHSD, lse_BHS, first_BS = _masked_forward(q_BHSD, k_BKSD, v_BKSD, mask, scale, kernel)
        ctx.save_for_backward(q_BHSD, k_BKSD, v_BKSD, mask, first_BS, out_BHSD, lse_BHS)
        ctx.options = scale, kernel
        return out_BHSD

    @staticmethod
    def backward(ctx, dout_BHSD):
        return *_masked_backward(*ctx.saved_tensors, dout_BHSD, *ctx.options), None, None, None


@torch.library.custom_op("tilewright::masked_bf16_attention", mutates_args=())
def _masked_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Run masked attention forward on a CPU: result, log-sum-exp, and the first keys [1 or B, S]; -1 is the first of
    them where the mask is another one."""
    first = _first_of(mask)
    if first is not None:
        q, k, v = (_rows(x) for x in (q, k, v))
        out, lse = _heads_inside(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        _call(_functions(kernel).tw_attention, (q, k, v, out), lse, first, (), q, k, scale)
        return out, lse, first
    group = q.shape[1] // k.shape[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, expand(k, group), expand(v, group), 0.0, False, attn_mask=added_mask(mask, q.dtype), scale=scale
    )
    return _heads_inside(q).copy_(out), lse, _no_first(mask)


@_masked_forward.register_fake
def _(q, k, v, mask, scale, kernel):
    return _heads_inside(q), q.new_empty(q.shape[:3], dtype=torch.float32), _no_first(mask)


@torch.library.custom_op("tilewright::masked_bf16_attention_backward", mutates_args=())
def _masked_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, first: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (_heads_inside(x) for x in (q, k, v))
    if not first.numel() or first[0, 0] >= 0:
        q, k, v, out, dout = (_rows(x) for x in (q, k, v, out, dout))
        function = _functions(kernel).tw_attention_backward
        _call(function, (q, k, v, out), lse.contiguous(), first, (dout, dq, dk, dv), q, k, scale)
        return dq, dk, dv
    heads = k.shape[1], q.shape[1] // k.shape[1]
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, expand(k, heads[1]), expand(v, heads[1]), out, lse, 0.0, False,
        attn_mask=added_mask(mask, q.dtype), scale=scale,
    )  # fmt: skip
    for gradient, whole in zip((dq, dk, dv), found, strict=True):
        gradient.copy_(whole if whole.shape == gradient.shape else whole.unflatten(1, heads).sum(2))
    return dq, dk, dv


@_masked_backward.register_fake
def _(q, k, v, mask, first, out, lse, dout, scale, kernel):
    return _heads_inside(q), _heads_inside(k), _heads_inside(v)


def _no_first(mask: Tensor) -> Tensor:
    return mask.new_full((mask.shape[0], mask.shape[2]), -1, dtype=torch.int32)


def _first_of(mask: Tensor) -> Tensor | None:
    """The first key that each query sees, if it sees all from there up to itself; else None."""
    if mask.shape[1] != 1:
        return None
    seen, place = mask[:, 0], torch.arange(mask.shape[2], dtype=torch.int32)
    first = seen.to(torch.uint8).argmax(-1).to(torch.int32) if seen.numel() else seen.sum(-1, dtype=torch.int32)
    wanted = (place >= first[:, :, None]) & (place[:, None] >= place)
    return first if torch.equal(seen, wanted) and bool((first[:, 1:] >= first[:, :-1]).all()) else None


def _functions(kernel: str) -> ctypes.CDLL:
    return amx.functions(AMX_ATTENTION) if kernel == "amx" else AVX512_ATTENTION.functions


def _rows(x_BHSD: Tensor) -> Tensor:
    if x_BHSD.dtype != torch.bfloat16:
        raise TypeError(f"BF16 is needed, not {x_BHSD.dtype}")
    return x_BHSD if x_BHSD.stride(-1) == 1 else x_BHSD.contiguous()


def _heads_inside(x_BHSD: Tensor) -> Tensor:
    """An empty result for attention on a CPU of the same shape, [B, S, H, D] in memory: what the projections beside it
    take."""
    batch, heads, positions, width = x_BHSD.shape
    return x_BHSD.new_empty((batch, positions, heads, width)).transpose(1, 2)


def _call(
    function: Callable[..., int], operands: Sequence[Tensor], lse: Tensor, first: Tensor | None,
    more: Sequence[Tensor], q: Tensor, k: Tensor, scale: float,
) -> None:  # fmt: skip
    batch, heads, positions, width = q.shape
    if first is not None:
        first = first.expand(batch, positions).contiguous()
    pointers = [address(x) for x in (*operands, lse)]
    pointers += [address(first), *(address(x) for x in more)]
    strides = [x.stride(i) for x in (*operands, *more) for i in range(3)]
    sizes = (batch, heads, k.shape[1], positions, width)
    if function(
        (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(strides))(*strides),
        (ctypes.c_int64 * len(sizes))(*sizes), scale, torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError("no memory to pack the operands of attention")
