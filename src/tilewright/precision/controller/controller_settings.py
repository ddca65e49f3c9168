"""How a controller decides, and what cannot be asked of it. Plain Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.core.errors import ConfigError, FitError
from tilewright.core.units import format_share
from tilewright.precision.controller.groups import GRANULARITIES, GemmSite
from tilewright.precision.controller.thresholds import LIMITS, Threshold


@dataclass(frozen=True)
class ControllerSettings:
    """How a controller decides.

    Args:
        granularity: what moves together, one of `GRANULARITIES`.
        budget: largest share of the matmuls' work above 8 bits, 0 to 1; what the policy itself keeps there counts.
        interval: steps between samples.
        cooldown: steps between two moves of one unit.
        patience: samples in a row that must be good before a unit comes down.
        recalibrate_interval: steps between larger samples, after which a unit that is good comes down without waiting.
        retry_steps: compute bad steps again; else they are only looked at where they are not finite.
        spike_factor: see `SpikeDetector.factor`.
        thresholds: by signal.
    """

    granularity: str = "per_gemm"
    budget: float = 0.5
    interval: int = 100
    cooldown: int = 200
    patience: int = 3
    recalibrate_interval: int = 1000
    retry_steps: bool = True
    spike_factor: float = 8.0
    thresholds: Mapping[str, Threshold] = field(default_factory=lambda: LIMITS)

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ConfigError(
                "Unknown granularity of the controller",
                got=repr(self.granularity),
                need=", ".join(GRANULARITIES),
                where="precision.controller.granularity",
            )
        wrong = [
            name for name in ("interval", "cooldown", "patience", "recalibrate_interval") if getattr(self, name) < 1
        ]
        if wrong or not 0 <= self.budget <= 1:
            raise ConfigError(
                "Invalid controller settings",
                got=", ".join(f"{name} {getattr(self, name)}" for name in (*wrong, "budget")),
                need="counts of at least 1, and a budget from 0 to 1",
            )


def check_budget(sites: Sequence[GemmSite], budget: float) -> None:
    """Check a budget in the controller's settings: the policy itself may keep more work above 8 bits than it allows.

    Raises:
        FitError: it does; the error names the smallest budget that can be kept.
    """
    total = sum(site.flops for site in sites) or 1.0
    kept = [site for site in sites if site.base > 0]
    least = sum(site.flops for site in kept) / total
    if least <= budget + 1e-9:
        return
    raise FitError(
        "Controller budget is too small",
        got=f"{format_share(budget)} of the matmuls' work may be above 8 bits",
        need=f"at least {format_share(least)}, which the policy itself keeps there: {len(kept)} matmuls, "
        f"the first is {kept[0].layer} {kept[0].gemm}",
        try_=f"precision.controller.budget = {math.ceil(least * 100) / 100:.2f}, or precision.bf16_grad_layers = []",
        where="precision.controller.budget",
    )
