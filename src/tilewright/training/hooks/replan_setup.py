"""A run's `AdaptiveReplanner`: what it may use and measures, its planner and its log."""

import time
from collections.abc import Callable
from functools import partial

import psutil
import torch

from tilewright.core.config.change_recipe import changed
from tilewright.core.errors import TilewrightError
from tilewright.core.memory_plan import MemoryPlan
from tilewright.planner.model.constraints import fuses, same_bits
from tilewright.training.assemble import Components, RunContext
from tilewright.training.hooks.adaptive_replanner import AdaptiveReplanner
from tilewright.training.hooks.rank_agreement import Agreement, planner_on_first
from tilewright.training.planning.does_not_fit import changes_to_fit
from tilewright.training.planning.resolve_plan import fixed_by_user
from tilewright.training.runlog.recorder import MetricsLogger

GROWTH = 0.03
"""Of a step beyond the second on a CPU, where the allocator keeps free blocks (measured in eight runs: 3 to 7 %)."""
LOOK_S = 1.0
"""Seconds between two looks at the machine's free memory."""
LESS = 0.95
"""Of the planned peak of a run that found no memory, what proposals are to stay below."""


def replanner_for(
    setup: RunContext,
    parts: Components,
    recorder: MetricsLogger,
    *,
    budget: Callable[[], float] | None = None,
    agreement: Agreement | None = None,
) -> AdaptiveReplanner:
    """Set up the re-planner of this run. With `memory.plan = ""` all memory plans stay, but for a step without memory.

    Args:
        setup: machine and plan.
        parts: what a step needs.
        recorder: told every decision.
        budget: bytes that the run may use now; by default its limit, and what the machine has free.
        agreement: of several ranks: what they measure is the worst of them, so that all decide the same.
    """

    def record_event(step: int, text: str, *, shown: bool, **numbers: object) -> None:
        recorder.event(step, "replan", text, shown=shown, **numbers)

    agreement = agreement or Agreement()
    reserve = setup.plan.reserve_bytes  # what the device holds of this process outside of its allocator
    free = budget or MemoryWatch(setup.memory_limit, setup.device, reserve, ranks=setup.world.local_size)
    return AdaptiveReplanner(
        parts.executor,
        partial(planner_on_first, setup.replanner, agreement),
        parts.memory_tracker,
        free,
        record_event,
        steps=setup.recipe.train.steps,
        ladder=_ladder(setup, parts.executor.memory_plan),
        growth=GROWTH if setup.device.type == "cpu" else 0.0,
        reserve=reserve,
        agreement=agreement,
        watch=bool(setup.recipe.memory.plan),
        known=None if setup.plan.shape.unknown else setup.plan,
    )


def _ladder(setup: RunContext, memory_plan: MemoryPlan) -> frozenset[str]:
    """The re-planner's choices for layers where no planner knows the model: those that change no bit, and those that
    are open."""
    if not setup.recipe.memory.plan or "train.activation_checkpoint" in fixed_by_user(setup.loaded):
        return frozenset()
    fused = fuses(setup.compiles, setup.machine)
    kinds = [same_bits(setup.recipe, fused, layer.activations) for layer in memory_plan.layers]
    return frozenset.intersection(*map(frozenset, kinds))


def cheapest_fixes(setup: RunContext) -> list[str]:
    """The three cheapest changes that make this run take less memory, for the re-planner's error; none if it cannot be
    planned."""
    budget = int(LESS * min(setup.memory_limit, setup.plan.peak_bytes))
    recipe = changed(setup.recipe, {"plan.device_memory": budget})
    try:
        return [str(fix) for fix in changes_to_fit(recipe, setup.site)]
    except TilewrightError:  # what is in the error then are settings without numbers
        return []


class MemoryWatch:
    """Bytes that this process may use on its device now: its limit, or what it holds and what is free, if that is less.

    Args:
        limit: of the run.
        device: where it trains. On `cpu` the host's memory.
        reserve: bytes that this process holds of the device outside of its allocator.
        clock: seconds; the machine is asked once a second at most.
        ranks: processes of the run on this machine, which share what is free of the host.
    """

    def __init__(
        self,
        limit: int,
        device: torch.device,
        reserve: int = 0,
        clock: Callable[[], float] = time.monotonic,
        ranks: int = 1,
    ) -> None:
        self.limit = limit
        self._device, self._reserve, self._clock, self._ranks = device, reserve, clock, ranks
        self._looked, self._there = -LOOK_S, 0

    def __call__(self) -> float:
        """Watch memory for the re-planner, before each step."""
        if (now := self._clock()) - self._looked >= LOOK_S:
            self._looked, self._there = now, there_bytes(self._device, self._ranks) + self._reserve
        return float(min(self.limit, self._there))


def there_bytes(device: torch.device, ranks: int = 1) -> int:
    """Free bytes for the re-planner of a device (of a host's memory the share of one of so many ranks), and bytes of
    this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available // ranks + psutil.Process().memory_info().rss
