"""How a model's matmul work is divided among formats, in numbers and in words. Without torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright.core.units import format_share
from tilewright.precision.policy.gemm_names import GEMM_NAMES


def shares(rows: Iterable[tuple[Sequence[str], float]]) -> dict[str, float]:
    """Shares of the matmul work in each format, the largest first; empty where there is no work.

    Args:
        rows: formats of a part's three matmuls (or one for all three), and the work of one matmul.

    Example:
        >>> shares([(("fp8_tile",), 3.0), (("fp8_tile", "bf16", "bf16"), 1.0)])
        {'fp8_tile': 0.8333333333333334, 'bf16': 0.16666666666666666}
    """
    sums: dict[str, float] = {}
    for formats, flops in rows:
        for name in formats if len(formats) > 1 else [*formats] * len(GEMM_NAMES):
            sums[name] = sums.get(name, 0.0) + flops
    total = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {name: flops / total for name, flops in ordered if flops}


def recorded_shares(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The shares of formats of a run by the rows of its precision.json.

    Example:
        >>> recorded_shares([{"compute": "bf16", "gemms": None, "work": 8.0}, {"compute": "fp32", "gemms": None}])
        {'bf16': 1.0}
    """
    return shares(
        ([row["gemms"][name] for name in GEMM_NAMES] if row.get("gemms") else [row["compute"]], row.get("work", 0.0))
        for row in rows
    )


def shares_text(found: Mapping[str, float]) -> str:
    """The shares of formats in words.

    Example:
        >>> shares_text({"fp8_tile": 0.9, "bf16": 0.1})
        '90.0 % fp8_tile, 10.0 % bf16 (matmuls with weights of a training step; attention scores are not counted)'
    """
    parts = ", ".join(f"{format_share(share)} {name}" for name, share in found.items())
    return f"{parts} (matmuls with weights of a training step; attention scores are not counted)"
