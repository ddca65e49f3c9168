"""The wire format of gradients (`parallel.grad_sync`) in a run: the error of their sums is measured now and then, and
where it is too large they are sent in the next wider format from then on. It never comes back down.

What FP8 loses is some percent of a sum of gradients that have nothing to do with each other; more where those of ranks
cancel, as the error stays what it was while the sum becomes small. A gradient that is infinite or NaN is no reason: in
FP32 it would be the same.
"""

from collections.abc import Mapping
from typing import Any, get_args

import torch.distributed as dist

from tilewright.core.config.sections.parallel import WireName
from tilewright.core.units import format_share
from tilewright.parallel.communicate.gradient_sync import GradientSync
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.step_hook import Step, StepHook

EVERY = 50
"""Steps between measurements; the first step is one."""
PATIENCE = 2
"""Measurements in a row that must be too large."""
_BY_WIDTH: tuple[WireName, ...] = get_args(WireName)
"""The widest first."""


class GradSyncHook(StepHook):
    """Raises the wire format on evidence.

    Args:
        sync: of the run, made with a limit.
        limit: share of a sum that may be lost.
        everyone: all ranks, which decide alike.
    """

    name = "grad_sync"
    next_step = 1

    def __init__(self, sync: GradientSync, limit: float, everyone: dist.ProcessGroup | None) -> None:
        self._sync, self._limit, self._everyone = sync, limit, everyone
        self._above = 0
        self._found: dict[str, float] = {}

    def before_step(self, step: Step) -> Step:
        """Measure the error of gradients' sums in this step, where gradient sync is to be measured."""
        self._errors.measuring = step.number >= self.next_step and self._sync.wire != "fp32"
        return step

    def after_step(self, step: Step, result: StepResult) -> None:
        """Judge the measured error of gradient sync. A step that was skipped is measured again by the next one."""
        if not self._errors.measuring:
            return
        self._errors.measuring = False
        shares = self._errors.shares(self._everyone)
        if result.skipped is not None or not shares:
            self.next_step = step.number + 1
            return
        self.next_step = step.number + EVERY
        self._found = shares
        axis = max(shares, key=shares.__getitem__)
        self._above = self._above + 1 if shares[axis] > self._limit else 0
        if self._above >= PATIENCE:
            self._raise(step, axis)

    def _raise(self, step: Step, axis: str) -> None:
        before, share = self._sync.wire, self._found[axis]
        wire = _BY_WIDTH[_BY_WIDTH.index(before) - 1]
        self._sync.widen(wire)
        self._above = 0
        text = (
            f"gradients are sent as {wire.upper()} from step {step.number + 1} on, not {before.upper()}: the error of "
            f"their sum along {axis} was {format_share(share)} of it, {PATIENCE} times in a row above the limit of "
            f"{format_share(self._limit)} (parallel.grad_sync_error)"
        )
        step.recorder.event(
            step.number, "grad_sync", text, before=before, now=wire, axis=axis, error=share, limit=self._limit
        )

    def numbers(self, step: Step, result: StepResult) -> Mapping[str, Any]:
        """The last measurement of gradient sync, by axis."""
        return {f"grad_sync_error.{axis}": share for axis, share in self._found.items()}

    @property
    def _errors(self) -> Any:
        assert self._sync.errors is not None, "made with a limit"
        return self._sync.errors

    def state_dict(self) -> dict[str, Any]:
        """The state of gradient sync: its present format, and for how long its error has been too large."""
        return {"wire": self._sync.wire, "above": self._above, "next_step": self.next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of gradient sync; with the recipe's format where that is wider."""
        self._above, self.next_step = state["above"], state["next_step"]
        self._sync.widen(min(state["wire"], self._sync.wire, key=_BY_WIDTH.index))
