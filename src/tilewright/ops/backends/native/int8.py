"""INT8 matmuls by torch on CPUs: oneDNN's quantised linear, and `torch._int_mm`.

Both sum in INT32, exactly. oneDNN takes the activations as unsigned bytes with zero point 128: with signed ones torch
2.13 runs oneDNN's reference code (measured: 9 s instead of 0.9 ms for 32x1024x4096). Its weight is prepacked, in
oneDNN's own layout, which is neither copied nor saved.

In compiled code each is one operator that the compiler does not look into: inductor of torch 2.13 replaces `_int_mm`
with its scales by a kernel that gives garbage for one token, (1, 1, K).

Legend: M rows  N out features  K columns.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.core.hardware import Machine
from tilewright.ops.backends.ref.int8 import prepack
from tilewright.ops.base.dispatch import Case
from tilewright.ops.base.fingerprint import fingerprint

__all__ = ["int_mm", "onednn", "onednn_prepack", "prepack", "why_not_int_mm", "why_not_onednn"]

_DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")
"""Without one of these oneDNN may add pairs in 16 bits, which saturates."""


def why_not_onednn(machine: Machine, case: Case) -> str | None:
    """The `why_not` of INT8 by oneDNN (`onednn`)."""
    if case.device_type != "cpu":
        return "it is for CPUs"
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return f"torch {torch.__version__} has no onednn::qlinear_pointwise"
    if not machine.cpu_features & set(_DOT_PRODUCTS):
        return f"the CPU has none of {', '.join(_DOT_PRODUCTS)}, so sums of pairs may saturate"
    return None


def why_not_int_mm(machine: Machine, case: Case) -> str | None:
    """The `why_not` of INT8 by `int_mm`. Where a variable keeps oneDNN from dot products, torch asks it all the
    same."""
    if case.device_type != "cpu":
        return "on GPUs it asks for sizes that are multiples of 8 and over 16 rows"
    limited = [limit for limit in machine.cpu_limits if "MAX_CPU_ISA" in limit]
    if limited and not machine.cpu_features & set(_DOT_PRODUCTS):
        return f"with {limited[0]} torch adds pairs in 16 bits, which saturates"
    return None


def onednn_prepack(qdata_NK: Tensor) -> Tensor:
    """The INT8 weight in oneDNN's layout."""
    return torch.ops.onednn.qlinear_prepack(qdata_NK, None)


def onednn(codes_MK: Tensor, qdata_NK: Tensor, packed: Tensor, made_from: Tensor | None) -> Tensor:
    """Multiply INT8 operands by oneDNN: see `ops.int8_linear`."""
    run = _onednn_op if torch.compiler.is_compiling() else _onednn
    return run(codes_MK, qdata_NK, packed, made_from)


def int_mm(codes_MK: Tensor, qdata_NK: Tensor, packed: Tensor, made_from: Tensor | None) -> Tensor:
    """INT8 matmul by torch's `_int_mm`: see `ops.int8_linear`."""
    return _int_mm_op(codes_MK, qdata_NK) if torch.compiler.is_compiling() else _int_mm(codes_MK, qdata_NK)


def _onednn(codes_MK: Tensor, qdata_NK: Tensor, packed: Tensor, made_from: Tensor | None) -> Tensor:
    if made_from is not None and int(made_from) != fingerprint(qdata_NK.contiguous()):
        packed = onednn_prepack(qdata_NK)
    unsigned_MK = (codes_MK.view(torch.uint8) ^ 0x80).contiguous()  # plus 128
    ones_N = torch.ones(qdata_NK.shape[0])
    zeros_N = torch.zeros(qdata_NK.shape[0], dtype=torch.int32)
    return torch.ops.onednn.qlinear_pointwise(
        unsigned_MK, 1.0, 128, packed, ones_N, zeros_N, None, 1.0, 0, torch.float32, "none", [], ""
    )


def _int_mm(codes_MK: Tensor, qdata_NK: Tensor) -> Tensor:
    if codes_MK.shape[1] == 1:  # torch 2.13 on CPUs leaves the result unwritten where K = 1
        codes_MK, qdata_NK = F.pad(codes_MK, (0, 1)), F.pad(qdata_NK, (0, 1))
    return torch._int_mm(codes_MK, qdata_NK.T).to(torch.float32)


@torch.library.custom_op("tilewright::int8_onednn", mutates_args=())
def _onednn_op(codes: Tensor, qdata: Tensor, packed: Tensor, made_from: Tensor | None) -> Tensor:
    return _onednn(codes, qdata, packed, made_from)


@torch.library.custom_op("tilewright::int8_int_mm", mutates_args=())
def _int_mm_op(codes: Tensor, qdata: Tensor) -> Tensor:
    return _int_mm(codes, qdata)


@_onednn_op.register_fake
def _(codes, qdata, packed, made_from):
    return codes.new_empty((codes.shape[0], qdata.shape[0]), dtype=torch.float32)


@_int_mm_op.register_fake
def _(codes, qdata):
    return codes.new_empty((codes.shape[0], qdata.shape[0]), dtype=torch.float32)
