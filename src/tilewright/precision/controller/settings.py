"""How a controller decides, and what cannot be asked of it. Plain Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.core.errors import ConfigError, FitError
from tilewright.core.units import format_share
from tilewright.precision.controller.groups import POLICIES, GemmSite
from tilewright.precision.controller.thresholds import LIMITS, Threshold


@dataclass(frozen=True)
class ControllerSettings:
    """How a controller decides.

    Args:
        policy: what moves together, one of `POLICIES`.
        budget: largest share of the products' work above 8 bits, 0 to 1; what the policy itself keeps there counts.
        every: steps between samples.
        cooldown: steps between two moves of one unit.
        quiet: samples in a row that must be good before a unit comes down.
        recalibrate: steps between larger samples, after which a unit that is good comes down without waiting.
        redo: redo bad steps; else they are only looked at where they are not finite.
        spike_factor: see `SpikeDetector.factor`.
        limits: by signal.
    """

    policy: str = "per_gemm"
    budget: float = 0.5
    every: int = 100
    cooldown: int = 200
    quiet: int = 3
    recalibrate: int = 1000
    redo: bool = True
    spike_factor: float = 8.0
    limits: Mapping[str, Threshold] = field(default_factory=lambda: LIMITS)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                "The controller has no such policy.",
                got=repr(self.policy),
                need=", ".join(POLICIES),
                where="precision.controller_policy",
            )
        wrong = [name for name in ("every", "cooldown", "quiet", "recalibrate") if getattr(self, name) < 1]
        if wrong or not 0 <= self.budget <= 1:
            raise ConfigError(
                "The controller's settings make no sense.",
                got=", ".join(f"{name} {getattr(self, name)}" for name in (*wrong, "budget")),
                need="counts of at least 1, and a budget from 0 to 1",
            )


def check_budget(sites: Sequence[GemmSite], budget: float) -> None:
    """The policy itself may keep more work above 8 bits than a budget allows.

    Raises:
        FitError: it does; the error names the smallest budget that can be kept.
    """
    total = sum(site.flops for site in sites) or 1.0
    kept = [site for site in sites if site.base > 0]
    least = sum(site.flops for site in kept) / total
    if least <= budget + 1e-9:
        return
    raise FitError(
        "The controller's budget cannot be kept.",
        got=f"{format_share(budget)} of the products' work may be above 8 bits",
        need=f"at least {format_share(least)}, which the policy itself keeps there: {len(kept)} products, "
        f"the first is {kept[0].layer} {kept[0].gemm}",
        try_=f"precision.controller_budget = {math.ceil(least * 100) / 100:.2f}, or precision.decouple = []",
        where="precision.controller_budget",
    )
