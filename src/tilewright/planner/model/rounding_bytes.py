"""Bytes of rounding weights and inputs to integers and back, as quantisation-aware training does in each pass.

The matmuls are those of the mode and as fast as without it. What is added are loops over elements, and for backward the
rounded weight in FP32 and the rounded input of each linear layer. Hugging Face models are traced with them; these
numbers are for the decoder, whose layers are counted.
"""

from collections.abc import Iterable

from tilewright.planner.model.gemms import LinearGemm
from tilewright.planner.model.model_shape import Line
from tilewright.precision.integer.compute_formats import COMPUTE_FORMATS

EAGER_BYTES = 74
"""Read and written per element: range (8), scale spread (4), division, rounding, limits, NaN (12 + 3 x 8), to a code
and back (10), times scale (12), cast (4)."""
FUSED_BYTES = 12
"""The same in two loops: the range, then all else."""
_FP32 = 4


def rounding_moved(matmuls: Iterable[LinearGemm], seq_len: int, *, compiled: bool) -> Line:
    """Bytes that a forward pass reads and writes to round weights and inputs to integers."""
    weights, inputs = _elements(matmuls)
    each = FUSED_BYTES if compiled else EAGER_BYTES
    return Line(each * weights, each * inputs * seq_len)


def rounding_kept(matmuls: Iterable[LinearGemm], seq_len: int, input_bytes: int) -> Line:
    """Bytes that rounding keeps for backward: rounded weights, and rounded inputs of `input_bytes` per element."""
    weights, inputs = _elements(matmuls)
    return Line(_FP32 * weights, input_bytes * inputs * seq_len)


def _elements(matmuls: Iterable[LinearGemm]) -> tuple[float, float]:
    """Count the elements that are rounded: weights, and inputs of one token."""
    rounded = [matmul for matmul in matmuls if matmul.integers]
    inputs = [m.num_in * m.share for m in rounded if COMPUTE_FORMATS[m.integers].rounds_inputs]
    return float(sum(matmul.num_weights for matmul in rounded)), float(sum(inputs))
