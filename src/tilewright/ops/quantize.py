"""quantize, quantize_both, rms_norm_quantize, swiglu_quantize: copies in codes with a scale per tile. No autograd.

quantize(x_MK, form, noise=None) -> TiledTensor [M, K], in the `OperandFormat` form.
quantize_both(x_MK, form) -> (row, column), from one read of x: `row` is x in form, and `column` is x transposed in
form, along the tokens, a TiledTensor [K, M]; on CPU its codes may be a transposed view.
`formats.quantize` is the definition: codes and scales of every candidate are equal to its, bit for bit. Kernels know
E4M3 and E5M2 with FP32 scales (of `quantize_both` in 1x128); every candidate has the definition itself for the rest.
x is FP32, BF16 or FP16. The case's dtype is x's.

rms_norm_quantize(x, weight_D, eps, form) -> (y, row, column)
swiglu_quantize(gate, up, form) -> (y, row, column)
A norm or activation and quantised copies of its result: y is what `rms_norm` and `swiglu` return, in x's dtype and
shape [..., D]; row and column are `quantize_both` of y as [tokens, D]. The copies are of y as rounded to its dtype. The
case's dtype is x's (gate's).
"""

from tilewright.formats.tiled import OperandFormat, TiledTensor
from tilewright.ops.backends.cpu.build import FP8
from tilewright.ops.backends.ref import fp8 as ref
from tilewright.ops.backends.ref import math
from tilewright.ops.backends.triton.availability import needs_triton
from tilewright.ops.base.dispatch import Candidate, Op, always
from tilewright.ops.norm import native as rms_norm


def _in_rows(form: OperandFormat) -> bool:
    """Whether kernels make both copies at once. (By integers: torch.compile does not guard a look-up by tile.)"""
    return form.is_fp8 and (form.tile.rows, form.tile.cols) == (1, 128)


def _powers(form: OperandFormat) -> bool:
    return form.scale.rule != "exact"


def _triton(x_MK, form, noise=None) -> TiledTensor:
    if not form.is_fp8:
        return ref.quantize(x_MK, form, noise)
    from tilewright.ops.backends.triton import quantize  # it imports triton

    return quantize.quantize(x_MK, form.element, form.tile, _powers(form), noise)


def _triton_both(x_MK, form) -> tuple[TiledTensor, TiledTensor]:
    if not _in_rows(form):
        return _triton(x_MK, form), _triton(x_MK.T, form)
    from tilewright.ops.backends.triton import quantize  # it imports triton

    return quantize.quantize_both(x_MK, form.element, _powers(form))


def _cpu(x_MK, form, noise=None) -> TiledTensor:
    if not form.is_fp8:
        return ref.quantize(x_MK, form, noise)
    from tilewright.ops.backends.cpu import fp8  # it registers torch operators

    return fp8.quantize(x_MK, form.element, form.tile, _powers(form), noise)


def _cpu_both(x_MK, form) -> tuple[TiledTensor, TiledTensor]:
    if not _in_rows(form):
        return _cpu(x_MK, form), _cpu(x_MK.T, form)
    from tilewright.ops.backends.cpu import fp8  # it registers torch operators

    return fp8.quantize_both(x_MK, form.element, _powers(form))


QUANTIZE = Op(
    "quantize",
    (
        Candidate("triton", _triton, needs_triton),
        Candidate("cpu", _cpu, FP8.why_not),
        Candidate("ref", ref.quantize, always),
    ),
)
QUANTIZE_BOTH = Op(
    "quantize_both",
    (
        Candidate("triton", _triton_both, needs_triton),
        Candidate("cpu", _cpu_both, FP8.why_not),
        Candidate("ref", ref.quantize_both, always),
    ),
    setting="quantize",
)


def _triton_norm(x, weight_D, eps, form):
    if not _in_rows(form):
        return ref.rms_norm_quantize(x, weight_D, eps, form)
    from tilewright.ops.backends.triton import fused  # it imports triton

    return fused.rms_norm_quantize(x, weight_D, eps, form.element, _powers(form))


def _triton_swiglu(gate, up, form):
    if not _in_rows(form):
        return ref.swiglu_quantize(gate, up, form)
    from tilewright.ops.backends.triton import fused  # it imports triton

    return fused.swiglu_quantize(gate, up, form.element, _powers(form))


def _cpu_norm(x, weight_D, eps, form):
    """Not fused: on a CPU the norm is compiled with its neighbours, and its result is read from the cache."""
    return _cpu_copies(rms_norm(x, weight_D, eps), form)


def _cpu_swiglu(gate, up, form):
    return _cpu_copies(math.swiglu(gate, up), form)


def _cpu_copies(y, form):
    return y, *_cpu_both(y.reshape(-1, y.shape[-1]), form)


RMS_NORM_QUANTIZE = Op(
    "rms_norm_quantize",
    (
        Candidate("triton", _triton_norm, needs_triton),
        Candidate("cpu", _cpu_norm, FP8.why_not),
        Candidate("ref", ref.rms_norm_quantize, always),
    ),
    setting="quantize",
)
SWIGLU_QUANTIZE = Op(
    "swiglu_quantize",
    (
        Candidate("triton", _triton_swiglu, needs_triton),
        Candidate("cpu", _cpu_swiglu, FP8.why_not),
        Candidate("ref", ref.swiglu_quantize, always),
    ),
    setting="quantize",
)
