"""Axes for the report's charts: data to pixels, and ticks that people can read."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.core.units import format_bytes, format_count, format_seconds

_LOG_LIMIT = 700.0
"""Natural logarithm of the largest number on an axis, 1e304; its negative is that of the smallest above zero."""


def format_number(value: float) -> str:
    """A number for an axis with at most four figures that matter, three where it needs an exponent.

    Example:
        >>> [format_number(x) for x in (0, 12, 3.14159, 0.00012345, 65536, 1234567.0, 1e9)]
        ['0', '12', '3.142', '0.000123', '65,536', '1,234,567', '1e+09']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"


def format_tick(value: float) -> str:
    """Write a number of an axis as text of at most seven characters.

    Example:
        >>> [format_tick(x) for x in (0.5, 20_000, 1e8)]
        ['0.5', '20,000', '1e+08']
    """
    return format_number(value) if abs(value) < 1e6 else f"{value:.3g}"


def format_percent(share: float) -> str:
    """A share of one as percent, for an axis.

    Example:
        >>> format_percent(0.0123), format_percent(0.5)
        ('1.23 %', '50 %')
    """
    return f"{share * 100:.3g} %"


def from_log(value: float) -> float:
    """exp(value) for a log axis, held between the smallest and the largest number that it shows.

    Example:
        >>> from_log(0.0), from_log(1e6) == from_log(1e9), from_log(-1e9) > 0
        (1.0, True, True)
    """
    return math.exp(min(max(value, -_LOG_LIMIT), _LOG_LIMIT))


FORMATS: dict[str, Callable[[float], str]] = {
    "number": format_number,
    "bytes": format_bytes,
    "count": format_count,
    "seconds": format_seconds,
    "percent": format_percent,
}
"""Unit of the numbers of an axis."""


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] in data to [start, end] in pixels, straight or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            low = math.log(self.low)
            share = (math.log(value) - low) / (math.log(self.high) - low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5, binary: bool = False) -> list[float]:
        """Choose about `count` round values inside an axis' range: on a log axis 1, 2, 5 and so on times powers of ten,
        or powers of two if `binary`; on a straight one multiples of a power of 1024 if `binary`."""
        if not self.log:
            return _ticks(self.low, self.high, count, binary)
        return _powers_of_two(self.low, self.high, count) if binary else _log_ticks(self.low, self.high, count)


def make_scale(values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Scale:
    """A scale of an axis that shows all values with a little air; `zero` puts the origin on it.

    On a log axis only positive values count. Without any value the range is [0, 1] ([1, 10] on a log axis).
    """
    shown = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not shown:
        return Scale(1.0, 10.0, start, end, True) if log else Scale(0.0, 1.0, start, end)
    low, high = min(shown), max(shown)
    if log:
        if high / low < 1.5:
            low, high = low / 1.5, high * 1.5
        return Scale(low / 1.1, high * 1.1, start, end, True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-9):
        pad = abs(high) * 0.1 if abs(high) > 1e-200 else 0.5  # what is smaller has no ticks
        low, high = (low if zero and low == 0 else low - pad), high + pad
    else:
        pad = 0.06 * (high - low)
        low = low if zero and low == 0 else low - pad
        high = high if zero and high == 0 else high + pad
    return Scale(low, high, start, end)


def _ticks(low: float, high: float, count: int, binary: bool) -> list[float]:
    rough = (high - low) / max(count, 1)
    if binary:
        unit = 1024.0 ** max(0, math.floor(math.log(max(high, 1), 1024)))
        return [t * unit for t in _ticks(low / unit, high / unit, count, False)]
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [0.0 if k == 0 else k * step for k in range(first, last + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 6, 8)):
        ticks = [m * 10.0**d for d in decades for m in mantissas if low <= m * 10.0**d <= high]
        if len(ticks) >= min(count, 4) - 1:
            break
    if len(ticks) < 2:
        return [t for t in _ticks(low, high, count, False) if t > 0]
    stride = -(-len(ticks) // (2 * count))
    return ticks[::stride]


def _powers_of_two(low: float, high: float, count: int) -> list[float]:
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    return [2.0**p for p in powers[:: -(-len(powers) // (count + 1)) or 1]]
