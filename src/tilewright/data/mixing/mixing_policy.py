"""The interface of a policy of mixing: losses and epochs by domain -> weights, with a reason, or none.

A policy is a function of what it was shown, in order, and of its state, which is plain JSON and of one size. It draws
no random numbers, so ranks that are shown the same answer the same, and a resumed run goes on as if it had not stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Weights = dict[str, float]


@dataclass(frozen=True)
class DomainSeen:
    """The facts on one domain at an evaluation, which a policy of mixing decides by."""

    held_out: float | None = None
    """Mean loss of held-out text, in nats per target; None: it has none."""
    trained: float | None = None
    """Mean training loss since the evaluation before; None: it had no rows, or the model does not tell."""
    epochs: float = 0.0
    """Times that its rows were trained on."""


@dataclass(frozen=True)
class MixEvaluation:
    """The facts on all domains at one evaluation, which a policy of mixing decides by."""

    step: int
    """Steps that are done."""
    steps: int
    """Steps of the whole run."""
    weights: Mapping[str, float]
    """That hold now; they sum to 1."""
    domains: Mapping[str, DomainSeen]
    """In the mixture's order."""


@dataclass(frozen=True)
class Refusal:
    """A move of mixture weights that a rule would have made, and why it is not made."""

    domain: str
    why: str


@dataclass(frozen=True)
class MixDecision:
    """The answer of a policy of mixing to an evaluation: weights with a reason, or none."""

    weights: Weights | None = None
    """That hold from now on, summing to 1; None: they stay."""
    why: str = ""
    refused: tuple[Refusal, ...] = field(default=())


class MixPolicy(Protocol):
    """A policy of mixing: a rule for the weights of domains."""

    name: str
    turn: int
    """Evaluations in a row that are shown losses of the same held-out batches."""

    def decide(self, seen: MixEvaluation) -> MixDecision:
        """A policy's decision on mixture weights by an evaluation. Called once for each, in their order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state of a mixing policy on which its next answers depend."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the same mixing policy from `state_dict()`."""
        ...


def shares(weights: Mapping[str, float]) -> Weights:
    """The weights of a mixing policy, divided by their sum.

    Example:
        >>> shares({"code": 3, "docs": 1})
        {'code': 0.75, 'docs': 0.25}
    """
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def change_line(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """The weights that a mixing policy changed by at least 0.0005, in words.

    Example:
        >>> change_line({"code": 0.75, "docs": 0.25}, {"code": 0.7, "docs": 0.3})
        'code 0.750 to 0.700, docs 0.250 to 0.300'
    """
    moved = [name for name in after if abs(after[name] - before[name]) >= 5e-4]
    words = ", ".join(f"{name} {before[name]:.3f} to {after[name]:.3f}" for name in moved)
    return words or "no weight by 0.0005"
