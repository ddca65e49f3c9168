"""A policy within its limits: what the training loop asks at each evaluation, and what a checkpoint holds of it."""

import math
from collections.abc import Mapping
from typing import Any

from tilewright.data.mixing.mixing_policy import MixDecision, MixEvaluation, MixPolicy, Refusal, Weights
from tilewright.data.mixing.weight_limits import MixLimits

_SAME = 1e-9
_NEAR = 1e-4  # of a goal that smoothing approaches


class Mixer:
    """A policy of mixing within its limits, which answers evaluations of a run.

    Args:
        policy: that weighs.
        limits: of all weights.
    """

    def __init__(self, policy: MixPolicy, limits: MixLimits) -> None:
        self.policy, self.limits = policy, limits
        self._full: list[str] = []
        self._goal: Weights | None = None  # what smoothing has not reached yet

    def decide(self, seen: MixEvaluation) -> MixDecision:
        """Decide by the mixer the weights that hold from now on, or none. A loss that is not finite moves nothing, and
        is not shown to the policy."""
        bad = [Refusal(name, text) for name, text in _not_finite(seen)]
        if bad:
            return MixDecision(refused=tuple(bad))
        asked = self.policy.decide(seen)
        full = self.limits.full({name: domain.epochs for name, domain in seen.domains.items()})
        news = [name for name in full if name not in self._full]
        self._full = full
        if asked.weights is not None:
            self._goal = asked.weights
        if self._goal is None and not news:
            return asked
        weights = self.limits.applied(self._goal or seen.weights, seen.weights, full)
        if all(abs(weights[name] - now) <= _NEAR for name, now in seen.weights.items()):
            self._goal = None
        if all(abs(weights[name] - now) <= _SAME for name, now in seen.weights.items()):
            return MixDecision(refused=asked.refused)
        told = [asked.why or "on the way to the last move's weights"] if asked.why or not news else []
        told += [f"{name}: seen {seen.domains[name].epochs:.2f} times, no more of it" for name in news]
        return MixDecision(weights, "; ".join(told), asked.refused)

    def state_dict(self) -> dict[str, Any]:
        """The mixer's state of the policy and its limits for a checkpoint, as plain JSON of one size at most."""
        return {"policy": self.policy.name, "state": self.policy.state_dict(), "full": self._full, "goal": self._goal}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Restore the mixer's state from `state_dict()`; what is to be said where that was of another policy, whose
        memory is dropped."""
        self._full = list(state["full"])
        if state["policy"] != self.policy.name:
            return (
                f"the checkpoint's policy was {state['policy']}, it is {self.policy.name} now: "
                "the weights stay, what the old policy remembered is dropped"
            )
        self._goal = None if state["goal"] is None else dict(state["goal"])
        self.policy.load_state_dict(state["state"])
        return None


def _not_finite(seen: MixEvaluation) -> list[tuple[str, str]]:
    found = []
    for name, domain in seen.domains.items():
        for kind, loss in (("held-out", domain.held_out), ("training", domain.trained)):
            if loss is not None and not math.isfinite(loss):
                found.append((name, f"its {kind} loss is {loss}: no weight moves at this evaluation"))
    return found
