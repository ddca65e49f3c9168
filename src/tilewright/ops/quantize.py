"""quantize, quantize_both, rms_norm_quantize, swiglu_quantize: copies in codes with a scale per tile. No autograd.

quantize(x_MK, form, noise=None) -> TiledTensor [M, K], in the `OperandFormat` form.
quantize_both(x_MK, form) -> (row, column), from one read of x: `row` is x in form, and `column` is x transposed in
form, along the tokens, a TiledTensor [K, M]; on CPU its codes may be a transposed view.
`formats.quantize` is the definition: codes and scales of every candidate are equal to its, bit for bit. Its kind says
what a kernel has to know (`quantize_kind`): "tiles" (E4M3 or E5M2 with power-of-two scales in FP32 per 1x128, 128x1 or
128x128, rounded to nearest), "fp8" (E4M3 or E5M2 with any other scales in FP32, or with noise) or "other".
x is FP32, BF16 or FP16. The case's dtype is x's.

rms_norm_quantize(x, weight_D, eps, form) -> (y, row, column)
swiglu_quantize(gate, up, form) -> (y, row, column)
A norm or activation and quantised copies of its result: y is what `rms_norm` and `swiglu` return, in x's dtype and
shape [..., D]; row and column are `quantize_both` of y as [tokens, D]. The copies are of y as rounded to its dtype. On
a GPU `exp` and the quotient of swiglu are approximate: y in 16 bits may be one unit off. The case's dtype is x's
(gate's).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilewright.formats.tiled import OperandFormat, TiledTensor
from tilewright.ops.backends.cpu.build import FP8
from tilewright.ops.backends.ref import fp8 as ref
from tilewright.ops.backends.ref import math
from tilewright.ops.backends.triton.availability import needs_triton
from tilewright.ops.base.dispatch import Candidate, Knows, Op, always
from tilewright.ops.norm import native as rms_norm

KINDS = ("tiles", "fp8", "other")
_TRITON = Knows(("tiles", "fp8"), "E4M3 and E5M2 with scales in FP32")
_CPU = Knows(
    ("tiles",),
    "E4M3 and E5M2 with power-of-two scales in FP32 per 1x128, 128x1 or 128x128, rounded to nearest",
)


def quantize_kind(form: OperandFormat, noise: Tensor | None = None) -> str:
    """The kind of a case of `quantize`. (By integers: torch.compile does not guard a look-up by tile.)"""
    if not form.is_fp8:
        return "other"
    known = (form.tile.rows, form.tile.cols) in ((1, 128), (128, 1), (128, 128))
    return "tiles" if known and noise is None and form.scale.rule == "ceil" else "fp8"


def _in_rows(form: OperandFormat) -> bool:
    """True if kernels of `quantize` make both copies at once, in rows."""
    return (form.tile.rows, form.tile.cols) == (1, 128)


def _powers(form: OperandFormat) -> bool:
    return form.scale.rule != "exact"


def _triton(x_MK, form, noise=None) -> TiledTensor:
    _TRITON.check(quantize_kind(form, noise))
    from tilewright.ops.backends.triton import quantize  # it imports triton

    return quantize.quantize(x_MK, form.element, form.tile, _powers(form), noise)


def _triton_both(x_MK, form) -> tuple[TiledTensor, TiledTensor]:
    _TRITON.check(quantize_kind(form))
    if not _in_rows(form):
        return _triton(x_MK, form), _triton(x_MK.T, form)
    from tilewright.ops.backends.triton import quantize  # it imports triton

    return quantize.quantize_both(x_MK, form.element, _powers(form))


def _cpu(x_MK, form, noise=None) -> TiledTensor:
    _CPU.check(quantize_kind(form, noise))
    from tilewright.ops.backends.cpu import fp8  # it registers torch operators

    return fp8.quantize(x_MK, form.element, form.tile)


def _cpu_both(x_MK, form) -> tuple[TiledTensor, TiledTensor]:
    _CPU.check(quantize_kind(form))
    if not _in_rows(form):
        return _cpu(x_MK, form), _cpu(x_MK.T, form)
    from tilewright.ops.backends.cpu import fp8  # it registers torch operators

    return fp8.quantize_both(x_MK, form.element)


def _op(name: str, triton: Callable[..., Any], cpu: Callable[..., Any], law: Callable[..., Any]) -> Op:
    candidates = (
        Candidate("triton", triton, _TRITON.why_not(needs_triton)),
        Candidate("cpu", cpu, _CPU.why_not(FP8.why_not)),
        Candidate("ref", law, always),
    )
    return Op(name, candidates, KINDS, setting="quantize")


def _triton_norm(x, weight_D, eps, form):
    if not _in_rows(form):
        return _copies(rms_norm(x, weight_D, eps), form, _triton_both)
    _TRITON.check(quantize_kind(form))
    from tilewright.ops.backends.triton import fused  # it imports triton

    return fused.rms_norm_quantize(x, weight_D, eps, form.element, _powers(form))


def _triton_swiglu(gate, up, form):
    if not _in_rows(form):
        return _copies(math.swiglu(gate, up), form, _triton_both)
    _TRITON.check(quantize_kind(form))
    from tilewright.ops.backends.triton import fused  # it imports triton

    return fused.swiglu_quantize(gate, up, form.element, _powers(form))


def _cpu_norm(x, weight_D, eps, form):
    """Norm before `quantize` on a CPU. Not fused: the norm is compiled with its neighbours, and its result is read from
    the cache."""
    return _copies(rms_norm(x, weight_D, eps), form, _cpu_both)


def _cpu_swiglu(gate, up, form):
    return _copies(math.swiglu(gate, up), form, _cpu_both)


def _copies(y, form, both):
    return y, *both(y.reshape(-1, y.shape[-1]), form)


QUANTIZE = _op("quantize", _triton, _cpu, ref.quantize)
QUANTIZE_BOTH = _op("quantize_both", _triton_both, _cpu_both, ref.quantize_both)
RMS_NORM_QUANTIZE = _op("rms_norm_quantize", _triton_norm, _cpu_norm, ref.rms_norm_quantize)
SWIGLU_QUANTIZE = _op("swiglu_quantize", _triton_swiglu, _cpu_swiglu, ref.swiglu_quantize)
