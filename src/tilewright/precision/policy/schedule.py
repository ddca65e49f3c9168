"""Precision of each step, as planned before the run: its mode, the least format of its matmuls, its learning rate.

A start mode for the first part of a run, then the mode proper; 8-bit matmuls that begin one after another, or give way
to BF16 at the end. Pure functions of the step, so a resumed run switches where an uninterrupted one does. What is
decided on evidence is the matter of `controller`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.core.config.sections.precision import PrecisionSection


@dataclass(frozen=True)
class ModeSchedule:
    """`start_mode` before step `switch_step`, `mode` from it on.

    Args:
        mode: the mode proper.
        start_mode: mode of the first steps; None for no switch.
        switch_step: first step (counted from 0) in `mode`.

    Example: TF32 for stability at first, BF16 after 20 % of the steps, as one of the articles advises.
        >>> schedule = ModeSchedule.over(1000, mode="bf16_mixed", start_mode="tf32", start_fraction=0.2)
        >>> schedule.at(199), schedule.at(200)
        ('tf32', 'bf16_mixed')
        >>> schedule.next_switch(0), schedule.next_switch(200)
        (200, inf)
    """

    mode: str
    start_mode: str | None = None
    switch_step: int = 0

    @classmethod
    def over(cls, steps: int, *, mode: str, start_mode: str | None = None, start_fraction: float = 0.2):
        """The schedule of precision modes of a run of `steps` steps. At least one step runs in each mode where there
        are two steps."""
        if start_mode is None:
            return cls(mode)
        return cls(mode, start_mode, min(max(round(start_fraction * steps), 1), max(steps - 1, 1)))

    @classmethod
    def from_section(cls, section: PrecisionSection, steps: int):
        """The schedule of precision modes of a recipe's `[precision]` section. `enabled = false` is FP32 throughout."""
        if not section.enabled:
            return cls("fp32")
        return cls.over(steps, mode=section.mode, start_mode=section.start_mode, start_fraction=section.start_fraction)

    def at(self, step: int) -> str:
        """The schedule's precision mode of the step (counted from 0)."""
        return self.start_mode if self.start_mode is not None and step < self.switch_step else self.mode

    def next_switch(self, step: int) -> float:
        """The first step after this one that has another mode; infinite if none has."""
        return self.switch_step if self.start_mode is not None and step < self.switch_step else math.inf


@dataclass(frozen=True)
class FormatSchedule:
    """The least format of each matmul by step: 8 bits where they are allowed, else BF16.

    Args:
        begin: first step (counted from 0) in which fprop, wgrad and dgrad may have 8 bits. Later for one than for the
            other is the articles' progressive start: weights, then activations, then gradients.
        end: first step in which they may not any more; None for never.
        after: what goes to BF16 then: "all", or "fprop" alone, which costs a third as much. (NVIDIA's NVFP4 report,
            appendix D: most of the gain of a switch before the end comes from the forward matmul.)

    Example:
        >>> schedule = FormatSchedule.over(100, fp8_from=(0.0, 0.1, 0.2), fp8_until=0.9, fp8_after="fprop")
        >>> schedule.floors(5), schedule.floors(95)
        ({'fprop': 0, 'wgrad': 1, 'dgrad': 1}, {'fprop': 1, 'wgrad': 0, 'dgrad': 0})
    """

    begin: tuple[int, int, int] = (0, 0, 0)
    end: int | None = None
    after: str = "all"

    @classmethod
    def over(
        cls,
        steps: int,
        *,
        fp8_from: tuple[float, float, float] = (0.0, 0.0, 0.0),
        fp8_until: float = 1.0,
        fp8_after: str = "all",
    ) -> "FormatSchedule":
        """The schedule of formats of a run of `steps` steps, from shares of it. `fp8_until = 1` is never."""
        fprop, wgrad, dgrad = (round(share * steps) for share in fp8_from)
        return cls((fprop, wgrad, dgrad), round(fp8_until * steps) if fp8_until < 1 else None, fp8_after)

    @classmethod
    def from_section(cls, section: PrecisionSection, steps: int) -> "FormatSchedule":
        """The schedule of formats of a recipe's `[precision]` section."""
        return cls.over(steps, fp8_from=section.fp8_from, fp8_until=section.fp8_until, fp8_after=section.fp8_after)

    @property
    def constant(self) -> bool:
        """True where a schedule of formats is constant: it changes nothing in any step."""
        return self.end is None and not any(self.begin)

    def floors(self, step: int) -> Mapping[str, int]:
        """The least format of each matmul in a step: 0 where 8 bits are allowed, 1 where it is BF16."""
        floors = {gemm: int(step < begin) for gemm, begin in zip(("fprop", "wgrad", "dgrad"), self.begin, strict=True)}
        if self.end is not None and step >= self.end:
            floors |= {"fprop": 1} if self.after == "fprop" else dict.fromkeys(floors, 1)
        return floors


def lr_factor(noise: float, strength: float) -> float:
    """The schedule's factor of the learning rate for noise: 1 / (1 + strength * noise).

    A gradient with relative noise r of independent sign loses alignment with the true one as 1 / sqrt(1 + r^2); a
    cautious rate falls faster, linearly at first. `strength` 0 leaves the rate alone; with 1, matmuls in E4M3 (noise
    0.03) lower it by 3 %. No paper was found that derives the best strength, so it is off unless asked for.

    Args:
        noise: mean noise over signal of the matmuls, see `Controller.noise`.
        strength: at least 0.

    Example:
        >>> lr_factor(0.25, 0.0), lr_factor(0.25, 4.0)
        (1.0, 0.5)
    """
    return 1.0 / (1.0 + strength * noise)
