"""Units that a controller moves, one by one or in groups, and its moves. Plain Python."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = ("fp8_tile", "bf16", "fp32")
"""Formats from the cheapest to the widest; a controller moves one step at a time."""
GRANULARITIES = ("per_gemm", "three_level")
ATTENTION = ("*attn.*", "*attention.*", "*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj", "*.qkv_proj", "*.out_proj")
"""Names of the linear layers of attention, for "three_level"."""


@dataclass(frozen=True)
class GemmSite:
    """One matmul of one layer.

    Args:
        layer: its name.
        gemm: fprop, dgrad or wgrad.
        base: index in `LEVELS` of the format that the policy gives it; a controller never goes below.
        flops: its share of the work, in any unit that is the same for all: multiplications a token.
    """

    layer: str
    gemm: str
    base: int
    flops: float


@dataclass(frozen=True)
class Move:
    """A matmul's change of format, with the number that decided.

    `evidence` names the signal, `value` is what it was and `threshold` what it was held against. `unit` names what
    moved, where several matmuls move together.
    """

    step: int
    layer: str
    gemm: str
    before: str
    after: str
    evidence: str
    value: float
    threshold: float
    unit: str = ""

    def __str__(self) -> str:
        return (
            f"{self.layer} {self.gemm} {self.before} -> {self.after} "
            f"({self.evidence} {self.value:.4g}, limit {self.threshold:.4g})"
        )


@dataclass(frozen=True)
class GemmGroup:
    """Matmuls that move together."""

    name: str
    sites: tuple[GemmSite, ...]


def units_of(sites: Sequence[GemmSite], granularity: str) -> list[GemmGroup]:
    """The groups of a policy's units, in the order of the model.

    Args:
        sites: all matmuls. granularity: "per_gemm": each matmul for itself. "three_level": as the articles have it,
        attention's linear layers,
            the other layers' forward matmuls, and their gradients' matmuls.

    Example:
        >>> layers = ("0.attn.q_proj", "0.up")
        >>> sites = [GemmSite(layer, gemm, 0, 1.0) for layer in layers for gemm in ("fprop", "wgrad")]
        >>> [unit.name for unit in units_of(sites, "three_level")]
        ['attention', 'forward', 'gradient']
    """
    if granularity == "per_gemm":
        return [GemmGroup(f"{site.layer} {site.gemm}", (site,)) for site in sites]
    groups: dict[str, list[GemmSite]] = {"attention": [], "forward": [], "gradient": []}
    for site in sites:
        attention = any(fnmatch.fnmatchcase(site.layer, pattern) for pattern in ATTENTION)
        groups["attention" if attention else "forward" if site.gemm == "fprop" else "gradient"].append(site)
    return [GemmGroup(name, tuple(group)) for name, group in groups.items() if group]
