"""Formats that each matmul of a run executed: rows, folded for reading, and compared between two runs. Without torch.

Rows are made by `audit`, are in audit.json of a run folder, and are shown by `tilewright inspect`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilewright.core.units import collapse_names, format_share, pattern_of

FILE = "audit.json"
"""Name in the run folder."""


@dataclass(frozen=True)
class AuditRow:
    """One matmul of one layer in one format.

    Args:
        layer: its name in the model.
        gemm: fprop, dgrad or wgrad; "all" where the three are not told apart.
        format: of the operands.
        kernel: the implementation that multiplied, as `ops` names it; "-" where the layer calls torch itself.
        calls: how often it ran; None where calls are not counted, and the row says what the conversion set.
        fallback: why it ran in another way than the policy said; empty where it did not.
    """

    layer: str
    gemm: str
    format: str
    kernel: str
    calls: int | None
    fallback: str = ""

    @property
    def counted(self) -> bool:
        """True where the calls in a row of an audit were counted as they ran."""
        return self.calls is not None

    def to_json(self) -> dict[str, Any]:
        """A row of an audit as plain data."""
        return asdict(self)


def read_rows(value: Mapping[str, Any]) -> list[AuditRow]:
    """Read the rows of an audit's table, audit.json.

    Raises:
        KeyError, TypeError: it is none.
    """
    return [AuditRow(**row) for row in value["rows"]]


def folded(rows: Iterable[AuditRow]) -> list[tuple[AuditRow, int]]:
    """Fold rows of an audit that differ only by the numbers in their layers' names, with their count and the sum of
    calls.

    Example:
        >>> rows = [AuditRow(f"layers.{i}.up", "fprop", "bf16", "native", 3) for i in range(2)]
        >>> [(row.layer, row.calls, count) for row, count in folded(rows)]
        [('layers.{0-1}.up', 6, 2)]
    """
    groups: dict[tuple[object, ...], list[AuditRow]] = {}
    for row in rows:
        key = (pattern_of(row.layer), row.gemm, row.format, row.kernel, row.fallback, row.counted)
        groups.setdefault(key, []).append(row)
    return [
        (replace(group[0], layer=_collapsed(row.layer for row in group), calls=_sum_of_calls(group)), len(group))
        for group in groups.values()
    ]


def shown(rows: Sequence[AuditRow]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Cells of a compact audit table (see `COLUMNS`), and the reasons that its last column numbers.

    Matmuls of a layer that differ in nothing else share a line.
    """
    reasons: list[str] = []
    gemms: dict[tuple[str, ...], list[str]] = {}
    for row, count in folded(rows):
        if row.fallback and row.fallback not in reasons:
            reasons.append(row.fallback)
        number = f"[{reasons.index(row.fallback) + 1}]" if row.fallback else "-"
        name = f"{row.layer}  x{count}" if count > 1 else row.layer
        calls = "not counted" if row.calls is None else str(row.calls)
        gemms.setdefault((name, row.format, row.kernel, calls, number), []).append(row.gemm)
    lines = [(name, " ".join(names), *rest) for (name, *rest), names in gemms.items()]
    return lines, [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]


COLUMNS = ("layer", "gemm", "format", "kernel", "calls", "fallback")


@dataclass(frozen=True)
class Difference:
    """Difference of two runs in one matmul, or in `count` of them whose names differ by numbers alone."""

    layer: str
    gemm: str
    what: str
    """formats, kernels, shares, fallbacks or layers."""
    first: str
    second: str
    count: int = 1


def differences(first: Sequence[AuditRow], second: Sequence[AuditRow]) -> list[Difference]:
    """Compare two audit tables: matmuls that ran in other formats, by other kernels, in other shares of their calls or
    with other fallbacks.

    How long the runs were does not count: calls are compared as shares, to a tenth of a percent.

    Example:
        >>> rows = [AuditRow("up", "fprop", "bf16", "native", 3)]
        >>> differences(rows, [AuditRow("up", "fprop", "bf16", "native", 9)])
        []
        >>> print(*differences(rows, [AuditRow("up", "fprop", "bf16", "ref", 3)]))
        Difference(layer='up', gemm='fprop', what='kernels', first='bf16 native', second='bf16 ref', count=1)
    """
    ours, theirs = _by_matmul(first), _by_matmul(second)
    found: dict[tuple[str, str, str, str, str], list[str]] = {}
    for layer, gemm in dict.fromkeys([*ours, *theirs]):
        for what, a, b in _compare(ours.get((layer, gemm), []), theirs.get((layer, gemm), [])):
            found.setdefault((pattern_of(layer), gemm, what, a, b), []).append(layer)
    return [
        Difference(_collapsed(layers), gemm, what, a, b, len(layers)) for (_, gemm, what, a, b), layers in found.items()
    ]


def _compare(first: Sequence[AuditRow], second: Sequence[AuditRow]) -> Iterable[tuple[str, str, str]]:
    """Compare audit tables by matmul: (what, in the first run, in the second run). Formats that differ imply the other
    differences."""
    if not first or not second:
        yield "layers", _formats(first) or "not there", _formats(second) or "not there"
    elif _formats(first) != _formats(second):
        yield "formats", _shares(first), _shares(second)
    else:
        for what, text in (("kernels", _kernels), ("shares", _shares), ("fallbacks", _fallbacks)):
            if text(first) != text(second):
                yield what, text(first), text(second)


def _by_matmul(rows: Iterable[AuditRow]) -> dict[tuple[str, str], list[AuditRow]]:
    """Rows of an audit table by layer and matmul; formats that never ran left out, where others of the matmul did."""
    matmuls: dict[tuple[str, str], list[AuditRow]] = {}
    for row in rows:
        matmuls.setdefault((row.layer, row.gemm), []).append(row)
    for key, found in matmuls.items():
        ran = [row for row in found if row.calls != 0]
        matmuls[key] = sorted(ran or found, key=lambda row: row.format)
    return matmuls


def _formats(rows: Sequence[AuditRow]) -> str:
    return ", ".join(dict.fromkeys(row.format for row in rows))


def _kernels(rows: Sequence[AuditRow]) -> str:
    return ", ".join(f"{row.format} {row.kernel}" for row in rows)


def _fallbacks(rows: Sequence[AuditRow]) -> str:
    return "; ".join(dict.fromkeys(row.fallback for row in rows if row.fallback)) or "none"


def _shares(rows: Sequence[AuditRow]) -> str:
    total = sum(row.calls or 0 for row in rows)
    if not total:
        return ", ".join(f"{row.format} ({'not counted' if row.calls is None else 'no calls'})" for row in rows)
    return ", ".join(f"{row.format} {format_share((row.calls or 0) / total)}" for row in rows)


def _sum_of_calls(rows: Iterable[AuditRow]) -> int | None:
    """Sum of calls in an audit table; None where calls are not counted."""
    calls = [row.calls for row in rows if row.calls is not None]
    return sum(calls) if calls else None


def _collapsed(layers: Iterable[str]) -> str:
    """Names of layers of an audit table collapsed to one."""
    return collapse_names(list(layers)) or "(model)"
