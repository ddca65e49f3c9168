"""Weights that no loss moves: `static`, `temperature`, `schedule`."""

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.data.mixing.mixing_policy import MixDecision, MixEvaluation, Weights, shares


class Static:
    """The weights stay those of `data.weights`: stratified sampling, which is what others are compared with."""

    name = "static"
    turn = 1

    def decide(self, seen: MixEvaluation) -> MixDecision:
        """Decide to keep the weights of the domains as they are: see `MixPolicy`."""
        return MixDecision()

    def state_dict(self) -> dict[str, Any]:
        """The state of static weights: see `MixPolicy`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of static weights: see `MixPolicy`."""


class Temperature(Static):
    """Weights in proportion to the T-th root of a domain's tokens: T = 1 is in proportion, large T is even.

    Args:
        tokens: of each domain.
        temperature: T.
    """

    name = "temperature"

    def __init__(self, tokens: Mapping[str, float], temperature: float) -> None:
        self.weights = shares({name: count ** (1 / temperature) for name, count in tokens.items()})
        self.temperature = temperature

    def decide(self, seen: MixEvaluation) -> MixDecision:
        """Decide the weights of the domains by a temperature, which no loss moves: see `MixPolicy`."""
        return moved_to(self.weights, seen, f"in proportion to tokens to the power of 1/{self.temperature:g}")


class Schedule(Static):
    """Weights by the share of the run's steps that is done.

    Args:
        stages: share from which on, and weights; ascending.
    """

    name = "schedule"

    def __init__(self, stages: Sequence[tuple[float, Mapping[str, float]]]) -> None:
        self.stages = [(at, shares(weights)) for at, weights in stages]

    def decide(self, seen: MixEvaluation) -> MixDecision:
        """Decide the weights of the domains by a schedule, which no loss moves: see `MixPolicy`."""
        begun = [(at, weights) for at, weights in self.stages if seen.step >= at * seen.steps]
        if not begun:
            return MixDecision()
        at, weights = begun[-1]
        whole = {name: weights.get(name, 0.0) for name in seen.weights}
        return moved_to(whole, seen, f"the stage from {at:.0%} of the steps on")


def moved_to(weights: Weights, seen: MixEvaluation, why: str) -> MixDecision:
    """A move to these fixed weights; none where they hold already."""
    if all(abs(weights[name] - now) < 1e-12 for name, now in seen.weights.items()):
        return MixDecision()
    return MixDecision(weights, why)
