"""Where evidence is bad enough to leave a format, and good enough to come back. Plain Python.

Two limits a signal: a matmul leaves a format at the first and comes back below the second, stricter one
(hysteresis), so noise around one of them moves nothing.
"""

import math
from dataclasses import dataclass

from tilewright.precision.controller.layer_statistics import OPERANDS, LayerStats


@dataclass(frozen=True)
class Threshold:
    """Limits of one signal: `escalate` is where a format is left, `relax` where it may be taken up again."""

    escalate: float
    relax: float


LIMITS = {
    "not_finite": Threshold(0.0, 0.0),
    "underflow": Threshold(0.02, 0.01),
    "dynamic_range_log2": Threshold(60.0, 50.0),
    "gain_error": Threshold(0.02, 0.01),
    "cosine": Threshold(0.98, 0.99),
    "sqnr_db": Threshold(14.0, 17.0),
}
"""Where they come from: over the matmuls of the default recipe in fp8_tile, at its start and after 30 steps, the worst
were underflow 0.001, gain error 0.007, cosine 0.994, 19.3 dB (a weight gradient that is small beside its operands; the
median is 30 to 37 dB, as two E4M3 operands give), and a dynamic range of 2^30.

- `underflow`: 20 times that. A tile of E4M3 spans 2^18.8: much underflow means much that is small beside
  one outlier.
- `gain_error`: three times that. Noise averages out over steps, a bias does not, so it is bounded below the noise.
- `sqnr_db`, `cosine`: noise of 20 % of the signal, twice that; 17 dB and 0.99 are 14 %.
- `dynamic_range_log2`: one tiny element among 128 widens a tile without harm, so it speaks only where it is absurd.
- `not_finite`: one element is one too many."""


@dataclass(frozen=True)
class Finding:
    """The worst signal of a matmul: `excess` is 1 at the limit and more beyond it."""

    excess: float
    name: str
    value: float
    threshold: float


def find(evidence: LayerStats, gemm: str, name: str, limits: dict[str, Threshold], *, relax: bool) -> Finding | None:
    """Find the signal nearest a threshold: of a matmul in format `name` that is farthest beyond its limit, or nearest
    to it.

    Args:
        evidence: of the layer.
        gemm: fprop, dgrad or wgrad.
        name: "fp8_tile" or "bf16"; tensors count for fp8_tile only.
        limits: by signal; a signal without a limit is not judged.
        relax: against the limits for coming back.

    Returns:
        None where the matmul was not measured in that format.
    """
    matmul = evidence.matmuls.get(f"{gemm}.{name}")
    if matmul is None:
        return None
    values = {"gain_error": matmul.gain_error, "cosine": matmul.cosine, "sqnr_db": matmul.sqnr_db}
    tensors = [evidence.tensors[key] for key in OPERANDS[gemm] if key in evidence.tensors]
    if name == "fp8_tile" and tensors:
        for signal in ("not_finite", "underflow", "dynamic_range_log2"):
            values[signal] = max((getattr(tensor, signal) for tensor in tensors), key=_nan_is_worst)
    found = []
    for signal, value in values.items():
        if signal in limits:
            limit = limits[signal].relax if relax else limits[signal].escalate
            found.append(Finding(excess(signal, value, limit), signal, value, limit))
    return max(found, key=lambda finding: finding.excess, default=None)


def excess(name: str, value: float, limit: float) -> float:
    """How far a value is beyond a threshold, as a ratio of errors: 1 is at the limit. Not a number: infinitely far.

    Example:
        >>> excess("gain_error", 0.04, 0.02), round(excess("sqnr_db", 14.0, 20.0), 2), excess("cosine", math.nan, 0.99)
        (2.0, 2.0, inf)
    """
    if math.isnan(value):
        return math.inf
    if name == "sqnr_db":
        return 10 ** ((limit - value) / 20) if math.isfinite(value) else (0.0 if value > 0 else math.inf)
    error, bound = (1 - value, 1 - limit) if name == "cosine" else (value, limit)
    if math.isinf(error):
        return math.inf
    return error / bound if bound else (math.inf if error > 0 else 0.0)


def _nan_is_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
