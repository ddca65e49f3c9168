"""The precision table: for every part of a model what it computes in, and why. Printed, and kept with a run.

Made by `convert`; read by people, by `precision.json` and by the report.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilewright.core.units import format_share
from tilewright.precision.policy.format_shares import shares, shares_text
from tilewright.precision.policy.gemm_formats import GEMM_NAMES, Gemms
from tilewright.precision.policy.policy import Policy

_SHOWN = 5
"""Parts that a sentence names."""


@dataclass(frozen=True)
class ModuleRow:
    """One part in a precision report: its name, kind, the formats of its operands, parameters and result, and the
    reason.

    "-" stands for what the part decides itself. `set_by_policy` is False where the part does what it does of itself,
    whatever the policy says. `gemms` are the formats of a linear layer's matmuls where 8-bit operands are among them.
    """

    fqn: str
    op: str
    compute: str
    storage: str
    output: str
    reason: str
    set_by_policy: bool = True
    gemms: Gemms | None = None
    fallback: bool = False
    """The part does not do what the policy asked for; `reason` says why."""
    work: float = 0.0
    """FLOPs per token of one of its matmuls, see `work_of` in `assign.module_kinds`."""
    matmul: str = ""
    """Where `compute` rounds to integers: the format that the rounded values are multiplied in."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of the three matmuls in a row of the precision report; one where they are alike."""
        return self.gemms.names if self.gemms else (self.compute,)


class Table(tuple[ModuleRow, ...]):
    """Rows that print as a table."""

    def __str__(self) -> str:
        return format_table(self)

    def to_json(self) -> list[dict[str, Any]]:
        """The rows of a precision report as plain dicts, for precision.json."""
        gemms = (row.gemms and dict(zip(GEMM_NAMES, row.gemms.names, strict=True)) for row in self)
        return [asdict(replace(row, gemms=None)) | {"gemms": names} for row, names in zip(self, gemms, strict=True)]


@dataclass(frozen=True)
class ConversionReport:
    """Report of a conversion.

    Args:
        policy: the policy applied, with its device.
        rows: the precision table.
        unmatched: rules and `fp32_ops` that change nothing here, each with the reason.
        notes: other facts worth knowing, such as parameters whose dtype was changed.
    """

    policy: Policy
    rows: Table
    unmatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> Table:
        """Rows of a precision report that follow the policy."""
        return Table(row for row in self.rows if row.set_by_policy)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of a training step's matmul work in each format, the largest first; see `work_of`."""
        return shares((row.formats, row.work) for row in self.rows)

    @property
    def needs_loss_scaling(self) -> bool:
        """True where by the precision report gradients pass through FP16, whose smallest normal value is 6e-5."""
        return any("fp16" in (row.compute, row.storage, row.output) for row in self.rows)

    def __str__(self) -> str:
        lines = [f"precision {self.policy.mode} on {self.policy.device_type}", str(self.rows)]
        lines += [f"matmul work: {shares_text(self.shares)}"] if self.shares else []
        lines += [f"no effect: {text}" for text in self.unmatched]
        return "\n".join([*lines, *(f"note: {text}" for text in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The precision report as plain data, for precision.json."""
        return {
            "mode": self.policy.mode,
            "device_type": self.policy.device_type,
            "rows": self.rows.to_json(),
            "shares": self.shares,
            "unmatched": list(self.unmatched),
            "notes": list(self.notes),
        }


def fallbacks(rows: Iterable[ModuleRow]) -> dict[str, list[ModuleRow]]:
    """Parts of a precision report that did not do what the policy asked for, by reason."""
    found: dict[str, list[ModuleRow]] = {}
    for row in rows:
        if row.fallback:
            found.setdefault(row.reason, []).append(row)
    return found


def worst(parts: Sequence[ModuleRow], rows: Iterable[ModuleRow]) -> str:
    """The share of a precision report's matmul work that fell back, and the parts that do most of it.

    Example:
        >>> rows = [ModuleRow(name, "other", "bf16", "-", "-", "because", work=4.0) for name in ("a", "b")]
        >>> worst(rows[:1], rows)
        '1 part with 50.0 % of the matmul work: a 50.0 %'
    """
    total = sum(row.work for row in rows) or 1.0
    ordered = sorted(parts, key=lambda row: -row.work)
    named = ", ".join(f"{row.fqn or '(model)'} {format_share(row.work / total)}" for row in ordered[:_SHOWN])
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    share = f"{format_share(sum(row.work for row in parts) / total)} of the matmul work"
    return f"{len(ordered)} part{'s' if len(ordered) > 1 else ''} with {share}: {named}{more}"


def format_table(rows: Iterable[ModuleRow]) -> str:
    """Write a precision report as aligned text; parts that differ only by their numbers share a line, with their count.

    Example:
        >>> row = ModuleRow("layers.0.up", "linear", "bf16", "fp32", "bf16", "because")
        >>> print(format_table([row, ModuleRow("layers.1.up", "linear", "bf16", "fp32", "bf16", "because")]))
        module           op      compute  storage  output  why
        layers.*.up  x2  linear  bf16     fp32     bf16    because
    """
    counts: dict[tuple[str, ...], int] = {}
    for row in rows:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.fqn) or "(model)"
        key = (name, row.op, row.compute, row.storage, row.output, row.reason)
        counts[key] = counts.get(key, 0) + 1
    lines = [(f"{key[0]}  x{count}" if count > 1 else key[0], *key[1:]) for key, count in counts.items()]
    return _align([("module", "op", "compute", "storage", "output", "why"), *lines])


def _align(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)
