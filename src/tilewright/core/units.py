"""Sizes and rates as people write them, and back. The one place where numbers are rounded for display."""

import re
from decimal import Decimal

_BINARY = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTORS = {key.lower(): value for key, value in (_BINARY | _DECIMAL).items()}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*\Z")


def parse_bytes(text: str | int) -> int:
    """Bytes from `"24GiB"`, `"24 MB"`, `"1024"` or a plain integer.

    Raises:
        ValueError: the text is not a number with a known unit, or is negative.

    Example:
        >>> parse_bytes("1.5 GiB"), parse_bytes("24MB"), parse_bytes(7)
        (1610612736, 24000000, 7)
    """
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(f"not a size: {text!r} (write it like '24GiB', '500MB' or '1024')")
    return int(Decimal(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(count: float) -> str:
    """Bytes as text with a binary unit and about three figures.

    Example:
        >>> format_bytes(1536), format_bytes(1000 * 2**20)
        ('1.50 KiB', '1000 MiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.0f} {unit}" if size >= 100 else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_count(count: float) -> str:
    """A count with an SI suffix: parameters, tokens, FLOP.

    Example:
        >>> format_count(46_936_576), format_count(512), format_count(0.4711)
        ('46.9M', '512', '0.47')
    """
    size = float(count)
    for suffix in ("", "k", "M", "G", "T", "P"):
        if abs(size) < 1000:
            if suffix == "":
                return f"{size:.0f}" if abs(size) >= 10 or size == int(size) else f"{size:.2g}"
            return f"{size:.3g}{suffix}"
        size /= 1000
    return f"{size:.3g}E"


def format_seconds(seconds: float) -> str:
    """A duration as people say it.

    Example:
        >>> format_seconds(0.0123), format_seconds(75), format_seconds(7400), format_seconds(4.2e-5)
        ('12.3 ms', '1m15s', '2h03m', '42 µs')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs" if seconds >= 1e-7 or not seconds else "under 0.1 µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"
    return f"{int(seconds) // 3600}h{int(seconds) % 3600 // 60:02d}m"
