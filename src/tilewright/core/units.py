"""Sizes, rates and numbered names as people write them. The one place where numbers are rounded for display."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal

_BINARY = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTORS = {key.lower(): value for key, value in (_BINARY | _DECIMAL).items()}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*\Z")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[kKMGT]?i?B(?:/s)?|m?s|m?J|kJ|kWh|%)(?:[\s,;:.)]|$))")
J_PER_KWH = 3.6e6
_NUMBER_IN_NAME = re.compile(r"(?<![^.])\d+(?![^.])")
HARD_SPACE = "\0"
"""A space at which text is not wrapped, until it is printed."""


def bind_units(text: str) -> str:
    """Bind units in text with hard spaces between numbers and their units, so that `14.1 ms` stays on one line.

    Example:
        >>> bind_units("14.1 ms of 3 steps, 1.22 GiB").split()
        ['14.1\\x00ms', 'of', '3', 'steps,', '1.22\\x00GiB']
    """
    return _BEFORE_UNIT.sub(HARD_SPACE, text)


def parse_bytes(text: str | int) -> int:
    """Parse bytes with units from `"24GiB"`, `"24 MB"`, `"1024"` or a plain integer.

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
    if not math.isfinite(size):
        return f"{size:g} B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.0f} {unit}" if size >= 100 else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_budget(count: float) -> str:
    """Bytes that are enough in a unit, as people type a size: rounded up.

    Example:
        >>> format_budget(1.001 * 2**30), format_budget(500 * 2**20)
        ('1.01GiB', '500MiB')
    """
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    hundredths = math.ceil(100 * count / unit) if unit == 2**30 else 100 * math.ceil(count / unit)
    return f"{Decimal(hundredths) / 100}{name}"


def format_count(count: float) -> str:
    """A count with a unit, an SI suffix: parameters, tokens, FLOP.

    Example:
        >>> format_count(46_936_576), format_count(512), format_count(0.4711)
        ('46.9M', '512', '0.47')
    """
    size = float(count)
    if not math.isfinite(size):
        return f"{size:g}"
    for suffix in ("", "k", "M", "G", "T", "P"):
        if abs(size) < 1000:
            if suffix == "":
                return f"{size:.0f}" if abs(size) >= 10 or size == int(size) else f"{size:.2g}"
            return f"{size:.3g}{suffix}"
        size /= 1000
    return f"{size:.3g}E"


def perplexity(loss: float) -> float:
    """The perplexity exp(loss) of a loss in units of nats; infinite where that is more than a double holds, from a loss
    of 709.8 on.

    Example:
        >>> perplexity(0.0), perplexity(345_341.0), perplexity(float("nan"))
        (1.0, inf, nan)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def format_perplexity(loss: float) -> str:
    """The perplexity of a loss in nats for display, as a power of e where a double does not hold it.

    Example:
        >>> format_perplexity(3.0), format_perplexity(345_341.0), format_perplexity(1e300)
        ('20.09', 'e^345,341', 'e^1e+300')
    """
    value = perplexity(loss)
    if math.isfinite(value) or not math.isfinite(loss):
        return f"{value:.4g}"
    return f"e^{loss:,.0f}" if loss < 1e9 else f"e^{loss:.3g}"


def bits_per_byte(loss_sum: float, num_bytes: int) -> float:
    """A unit of loss, bits per byte of text from the sum of its tokens' losses in nats: independent of the tokenizer.

    Example:
        >>> bits_per_byte(8 * math.log(2), 4)
        2.0
    """
    return loss_sum / math.log(2) / num_bytes


def format_bits(value: float) -> str:
    """Bits per byte for display with three decimals.

    Example:
        >>> format_bits(1.71551), format_bits(345_341.25)
        ('1.716', '3.45e+05')
    """
    return f"{value:.3f}" if not abs(value) >= 1000 else f"{value:.3g}"


def format_loss(loss: float) -> str:
    """A loss for display with four decimals, or fewer where it is so large that they say nothing.

    Example:
        >>> format_loss(2.71828), format_loss(345_341.25), format_loss(1e300), format_loss(float("nan"))
        ('2.7183', '345,341', '1e+300', 'nan')
    """
    if not abs(loss) >= 1000:
        return f"{loss:.4f}"
    return f"{loss:,.0f}" if abs(loss) < 1e9 else f"{loss:.3g}"


def format_share(share: float) -> str:
    """A share of one for display in percent. What is not nothing is not shown as nothing, and not all not as all.

    Example:
        >>> format_share(0.704), format_share(0.0004), format_share(0), format_share(0.99999), format_share(1)
        ('70.4 %', '< 0.1 %', '0 %', '> 99.9 %', '100 %')
        >>> format_share(-0.0004), format_share(-0.02)
        ('> -0.1 %', '-2.0 %')
    """
    if share in (0, 1):
        return f"{share * 100:.0f} %"
    if 0 < share < 0.001:
        return "< 0.1 %"
    if -0.001 < share < 0:
        return "> -0.1 %"
    return "> 99.9 %" if 0.9995 <= share < 1 else f"{share * 100:.1f} %"


def format_change(share: float) -> str:
    """A share by which something rose or fell, in percent with its sign. What rounds to nothing has none.

    Example:
        >>> format_change(0.0123), format_change(-0.1), format_change(-0.00004), format_change(0)
        ('+1.23 %', '-10.00 %', '0.00 %', '0.00 %')
    """
    shown = f"{100 * share:+.2f} %"
    return shown[1:] if shown[1:] == "0.00 %" else shown


def format_kwh(joules: float) -> str:
    """Joules in the unit kWh, whatever their size.

    Example:
        >>> format_kwh(7.2e6), format_kwh(3.6e5), format_kwh(2.73e11)
        ('2 kWh', '0.1 kWh', '75,833 kWh')
    """
    kwh = joules / J_PER_KWH
    return f"{kwh:,.0f} kWh" if kwh >= 1000 else f"{kwh:.3g} kWh"


def format_joules(joules: float) -> str:
    """Joules with a unit that fits.

    Example:
        >>> format_joules(0.0123), format_joules(34.2), format_joules(51_200.0), format_joules(7.2e6)
        ('12.3 mJ', '34.2 J', '51.2 kJ', '2 kWh')
        >>> format_joules(4.2e-5), format_joules(2.5e-10), format_joules(0.0)
        ('42 µJ', '250 pJ', '0 J')
    """
    if joules >= J_PER_KWH / 10:
        return format_kwh(joules)
    for size, unit in ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "\N{MICRO SIGN}J"), (1e-9, "nJ")):
        if joules >= size:
            return f"{joules / size:.3g} {unit}"
    return f"{joules * 1e12:.3g} pJ" if joules else "0 J"


def format_seconds(seconds: float) -> str:
    """A duration in units as people say it. What is not zero is not shown as zero.

    Example:
        >>> format_seconds(0.0123), format_seconds(75), format_seconds(7400), format_seconds(4.2e-5)
        ('12.3 ms', '1m15s', '2h03m', '0.042 ms')
        >>> format_seconds(0), format_seconds(1e-9), format_seconds(0.99996)
        ('0 s', '< 0.001 ms', '1.0 s')
    """
    if not math.isfinite(seconds):
        return f"{seconds:g} s"
    if seconds == 0:
        return "0 s"
    if 0 < seconds < 1e-6:
        return "< 0.001 ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{3 if seconds >= 1e-3 else 2}g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return "1m00s"
    if seconds < 3600:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"
    return f"{int(seconds) // 3600}h{int(seconds) % 3600 // 60:02d}m"


def pattern_of(name: str) -> str:
    """Replace the numbers in a module's name: names with one pattern are of one kind.

    Example:
        >>> pattern_of("layers.3.mlp.experts.12.up"), pattern_of("conv2d")
        ('layers.*.mlp.experts.*.up', 'conv2d')
    """
    return _NUMBER_IN_NAME.sub("*", name)


def collapse_names(names: Sequence[str]) -> str:
    """Names of one pattern as one for display, each number as the range of its values.

    Args:
        names: at least one; all with the same `pattern_of`. Not every combination of the numbers need be among them.

    Example:
        >>> collapse_names([f"layers.{i}.mlp.up_proj" for i in (0, 1, 2, 5)]), collapse_names(["layers.3.norm"])
        ('layers.{0-2,5}.mlp.up_proj', 'layers.3.norm')
    """
    values = [{int(number) for number in place} for place in zip(*map(_NUMBER_IN_NAME.findall, names), strict=True)]
    texts = iter([f"{{{ranges(sorted(found))}}}" if len(found) > 1 else str(*found) for found in values])
    return _NUMBER_IN_NAME.sub(lambda match: next(texts).replace(", ", ","), names[0])


def ranges(indices: Sequence[int]) -> str:
    """Layer numbers for display as people write them.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
