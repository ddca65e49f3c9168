"""Limits that no policy may leave: bounds of weights, a smaller step, and an end to repetition.

All of it is applied to what a policy asks for, in this order: domains that were seen often enough get nothing, the rest
moves by a part of the way, and each weight is brought between the bounds while they sum to 1.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tilewright.core.errors import ConfigError
from tilewright.data.mixing.mixing_policy import Weights, shares

_ROUNDS = 64


@dataclass(frozen=True)
class MixLimits:
    """Bounds of the weights of a mixture.

    Args:
        lowest, highest: share of any domain that has weight.
        smoothing: share of the old weights that a move keeps.
        max_epochs: times that a domain is trained on at most; 0: no limit. It holds to within one interval of
            evaluations, in which a domain cannot be stopped.
    """

    lowest: float = 0.0
    highest: float = 1.0
    smoothing: float = 0.0
    max_epochs: float = 0.0

    def check(self, domains: Collection[str]) -> None:
        """Check the limits of mixture weights: raise where none can be between the bounds.

        Raises:
            ConfigError: with what would be possible.
        """
        number = len(domains)
        if self.lowest * number <= 1 <= self.highest * number and self.lowest <= self.highest:
            return
        raise ConfigError(
            "Bounds of the mixture cannot be met",
            got=f"data.mixing.lowest = {self.lowest:g} and highest = {self.highest:g} for {number} domains",
            need=f"lowest at most {1 / number:.3g} and highest at least {1 / number:.3g}: the weights sum to 1",
            try_=f"data.mixing.lowest = {min(self.lowest, 0.5 / number):.3g}, "
            f"data.mixing.highest = {max(self.highest, min(1.0, 2 / number)):.3g}",
            where="data.mixing",
        )

    def full(self, epochs: Mapping[str, float]) -> list[str]:
        """Full domains, at their limit of repetition, not to be weighed any more; none where that would be all of
        them."""
        found = [name for name, count in epochs.items() if self.max_epochs and count >= self.max_epochs]
        return found if len(found) < len(epochs) else []

    def applied(self, wanted: Mapping[str, float], now: Mapping[str, float], full: Collection[str]) -> Weights:
        """The mixture weights within their limits that a move to `wanted` becomes.

        Args:
            wanted: weights of all domains.
            now: those that hold.
            full: domains that get nothing.

        Example:
            >>> limits = MixLimits(lowest=0.1, highest=0.6)
            >>> found = limits.applied({"a": 9, "b": 1, "c": 0}, {"a": 0.4, "b": 0.3, "c": 0.3}, ())
            >>> {name: round(weight, 9) for name, weight in found.items()}
            {'a': 0.6, 'b': 0.3, 'c': 0.1}
        """
        open_ = [name for name in wanted if name not in full]
        rest = {name: wanted[name] for name in open_}
        if not sum(rest.values()) > 0:  # all that the policy wants is full
            rest = (
                {name: now[name] for name in open_}
                if sum(now[name] for name in open_) > 0
                else dict.fromkeys(open_, 1.0)
            )
        goal = shares(rest)
        kept = {name: now[name] for name in open_}
        if sum(kept.values()) > 0:
            before = shares(kept)
            goal = {name: self.smoothing * before[name] + (1 - self.smoothing) * goal[name] for name in open_}
        return dict.fromkeys(wanted, 0.0) | self._bounded(goal)

    def _bounded(self, weights: Weights) -> Weights:
        """The weights between the limits' bounds; what is over or under is shared by the others in proportion."""
        number = len(weights)
        lowest, highest = min(self.lowest, 1 / number), max(self.highest, 1 / number)  # some domains may be full
        found, fixed = dict(weights), dict[str, float]()
        for _ in range(_ROUNDS):
            over = {name: highest for name, weight in found.items() if name not in fixed and weight > highest}
            under = {name: lowest for name, weight in found.items() if name not in fixed and weight < lowest}
            beyond = sum(found[name] - highest for name in over) - sum(lowest - found[name] for name in under)
            outside = over if beyond > 0 else under if beyond < 0 else over | under
            if not outside:
                break
            fixed |= outside
            free = [name for name in found if name not in fixed]
            left, total = 1 - sum(fixed.values()), sum(weights[name] for name in free)
            found = fixed | {name: left * (weights[name] / total if total else 1 / len(free)) for name in free}
        return {name: found[name] for name in weights}
