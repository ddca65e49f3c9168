"""Statistics of each linear layer in a sample: numbers on its tensors and on its three matmuls. Plain Python.

Measured by `monitor`, judged by `controller`, written to the run folder. The mean relative error is not among the
numbers, because it cannot tell one layer from another: it is 2 to 3 % for E4M3 under every scaling.

Samples are merged by taking the worse of each number, over micro-batches and over ranks alike, so it does not matter
how rows are spread over ranks. A number that is not one (NaN) is the worst there is.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

from tilewright.precision.policy.gemm_names import GEMM_NAMES

TENSORS = ("input", "weight", "gradient", "input_column", "gradient_column")
"""Operands of matmuls: `_column` in tiles of 128 tokens of one feature, as the weight gradient does."""
COMPARED = ("fp8_tile", "bf16")
"""Formats whose matmuls are compared, fp8_tile with a BF16 shadow, bf16 with an FP32 one."""
OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient_column", "input_column")}
"""Tensors that a matmul multiplies."""

_LOW_IS_WORSE = {"sqnr_db", "cosine", "gain_low"}


@dataclass(frozen=True)
class TensorStats:
    """A tensor in 8-bit tiles beside what it was.

    Args:
        amax: largest magnitude.
        underflow: share of the elements other than zero that became zero.
        saturation: share of the finite elements that were clipped.
        not_finite: share of the elements that were infinite or NaN.
        dynamic_range_log2: largest over the tiles of log2(greatest / least magnitude above zero).
        sqnr_db: signal to quantisation noise.
    """

    amax: float
    underflow: float
    saturation: float
    not_finite: float
    dynamic_range_log2: float
    sqnr_db: float


@dataclass(frozen=True)
class GemmStats:
    """A matmul a beside its shadow b in the next wider format.

    Args:
        gain_low: smallest gain <a, b> / <b, b> among the samples merged. Below 1 the matmul is biased towards zero.
        gain_high: largest.
        cosine: <a, b> / (|a| |b|).
        sqnr_db: 10 log10(|b|^2 / |a - b|^2).
    """

    gain_low: float
    gain_high: float
    cosine: float
    sqnr_db: float

    @property
    def gain_error(self) -> float:
        """The error of the gain in a layer's statistics: how far it is from 1. NaN where a gain is not a number."""
        errors = [abs(1 - self.gain_low), abs(1 - self.gain_high)]
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    @property
    def noise(self) -> float:
        """Noise over signal in a layer's statistics, 10^(-SQNR/20), at most 1; 1 where it is not a number."""
        return 1.0 if math.isnan(self.sqnr_db) else 10 ** (-max(self.sqnr_db, 0.0) / 20)


_PARTS: tuple[tuple[str, str, type], ...] = (
    *(("tensors", name, TensorStats) for name in TENSORS),
    *(("matmuls", f"{gemm}.{name}", GemmStats) for gemm in GEMM_NAMES for name in COMPARED),
)
_LENGTH = sum(len(fields(kind)) for _, _, kind in _PARTS)


@dataclass(frozen=True)
class LayerStats:
    """One layer. What was not measured is not there.

    Args:
        tensors: by name, see `TENSORS`.
        matmuls: by "gemm.format", such as "wgrad.fp8_tile".
    """

    tensors: Mapping[str, TensorStats] = field(default_factory=dict)
    matmuls: Mapping[str, GemmStats] = field(default_factory=dict)

    def vector(self) -> list[float]:
        """Write a layer's statistics as a vector, signed so that higher is worse; minus infinity for missing
        numbers."""
        numbers: list[float] = []
        for attribute, name, kind in _PARTS:
            part = getattr(self, attribute).get(name)
            values = astuple(part) if part is not None else [None] * len(fields(kind))
            numbers += [_signed(value, item.name) for value, item in zip(values, fields(kind), strict=True)]
        return numbers

    @classmethod
    def from_vector(cls, numbers: Sequence[float]) -> "LayerStats":
        """A layer's statistics back from `vector`."""
        found: dict[str, dict[str, Any]] = {"tensors": {}, "matmuls": {}}
        start = 0
        for attribute, name, kind in _PARTS:
            part = numbers[start : start + len(fields(kind))]
            start += len(part)
            if any(number != -math.inf for number in part):
                values = [-x if item.name in _LOW_IS_WORSE else x for x, item in zip(part, fields(kind), strict=True)]
                found[attribute][name] = kind(*values)
        return cls(**found)


@dataclass(frozen=True)
class QuantStats:
    """One sample of layer statistics: evidence by the layer's name.

    Example:
        >>> a = QuantStats({"up": LayerStats(matmuls={"fprop.fp8_tile": GemmStats(0.99, 0.99, 0.999, 30.0)})})
        >>> b = QuantStats({"up": LayerStats(matmuls={"fprop.fp8_tile": GemmStats(1.01, 1.01, 0.998, 28.0)})})
        >>> QuantStats.worst([a, b]).layers["up"].matmuls["fprop.fp8_tile"]
        GemmStats(gain_low=0.99, gain_high=1.01, cosine=0.998, sqnr_db=28.0)
    """

    layers: Mapping[str, LayerStats]

    @classmethod
    def worst(cls, samples: Iterable["QuantStats"]) -> "QuantStats":
        """Merge samples of layer statistics into the worst of each number."""
        vectors: dict[str, list[float]] = {}
        for sample in samples:
            for name, layer in sample.layers.items():
                new = layer.vector()
                vectors[name] = [max(pair) for pair in zip(vectors.get(name, new), new, strict=True)]
        return cls({name: LayerStats.from_vector(vector) for name, vector in vectors.items()})

    def vector(self, names: Sequence[str]) -> list[float]:
        """Statistics of the layers `names` as a vector, in that order; see `LayerStats.vector`."""
        return [x for name in names for x in self.layers.get(name, LayerStats()).vector()]

    @classmethod
    def from_vector(cls, names: Sequence[str], numbers: Sequence[float]) -> "QuantStats":
        """Statistics of layers back from `vector`."""
        parts = [numbers[i * _LENGTH : (i + 1) * _LENGTH] for i in range(len(names))]
        layers = {name: LayerStats.from_vector(part) for name, part in zip(names, parts, strict=True)}
        return cls({name: layer for name, layer in layers.items() if layer != LayerStats()})

    def to_json(self, digits: int | None = None) -> dict[str, Any]:
        """Statistics of layers as plain dicts; numbers that are not finite are texts ("inf", "-inf", "nan"), as JSON
        has none.

        Args:
            digits: significant digits to keep; None keeps all.
        """
        return {
            name: {
                "tensors": {key: _plain(asdict(part), digits) for key, part in layer.tensors.items()},
                "matmuls": {key: _plain(asdict(part), digits) for key, part in layer.matmuls.items()},
            }
            for name, layer in self.layers.items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "QuantStats":
        """Statistics of layers back from `to_json`."""
        return cls(
            {
                name: LayerStats(
                    {key: TensorStats(**_numbers(part)) for key, part in layer["tensors"].items()},
                    {key: GemmStats(**_numbers(part)) for key, part in layer["matmuls"].items()},
                )
                for name, layer in data.items()
            }
        )


def _signed(value: float | None, name: str) -> float:
    """A number of a layer's statistics, signed: higher is worse. Not a number is the worst."""
    if value is None:
        return -math.inf
    if math.isnan(value):
        return math.inf
    return -value if name in _LOW_IS_WORSE else value


def _plain(part: Mapping[str, float], digits: int | None) -> dict[str, float | str]:
    short = {name: value if digits is None else float(f"{value:.{digits}g}") for name, value in part.items()}
    return {name: value if math.isfinite(value) else str(value) for name, value in short.items()}


def _numbers(part: Mapping[str, float | str]) -> dict[str, float]:
    return {name: float(value) for name, value in part.items()}
