"""What ranks found of a case, against one process."""

from collections.abc import Mapping
from typing import Any

LIKE_ONE_PROCESS = 2e-6
"""Of a gradient in FP32, against its largest element: sums in another order, of some hundred summands."""


def check_errors(case: object, rank: int, found: Mapping[str, Any], bound: float) -> None:
    """The worst gradient is within `bound` of its largest element; the loss and the norm are those of one process."""
    worst = max(found["errors"], key=found["errors"].__getitem__)
    error = found["errors"][worst]
    print(f"{case}: rank {rank}: {worst} {error:.2g}, loss {found['loss']:.2g}, norm {found['norm']:.2g}")
    assert error <= bound, f"{case}, rank {rank}: {worst} is off by {error:.2g} of its largest element"
    assert found["loss"] <= 1e-6
    assert found["norm"] <= 1e-6
