"""Weights learned from losses: `exp3`, by how much there is to learn in a domain, and `aioli`, by what it does to all.

Sources: Albalak et al. 2023, "Efficient Online Data Mixing" (ODM); Chen et al. 2024, "Aioli" (arXiv 2411.05735). Both
were written for steps of one domain, or for runs cut into rounds; what differs is said in each class.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.data.mixing.mixing_policy import MixDecision, MixEvaluation, Weights, shares


class Exp3:
    """The reward of a domain is its training loss. Each domain's reward is a moving average, and weights are in
    proportion to its exponential, mixed with an even share that falls as 1/sqrt(t).

    ODM divides a reward by the probability with which its domain was drawn, because a step shows one domain. Here all
    domains that have weight are seen at each evaluation, so the loss is the reward.

    Args:
        domains: in their order.
        keep: share of the moving average that is kept.
    """

    name = "exp3"
    turn = 1

    def __init__(self, domains: Sequence[str], keep: float = 0.9) -> None:
        self.keep = keep
        self._reward = dict.fromkeys(domains, 0.0)
        self._seen = dict.fromkeys(domains, 0)
        self._evaluations = 0

    def decide(self, seen: MixEvaluation) -> MixDecision:
        """Decide learned weights of the domains by `exp3`: see `MixPolicy`."""
        for name, domain in seen.domains.items():
            if domain.trained is not None:
                keep = self.keep if self._seen[name] else 0.0
                self._reward[name] = keep * self._reward[name] + (1 - keep) * domain.trained
                self._seen[name] += 1
        number = len(self._reward)
        even = self._even(self._evaluations)
        self._evaluations += 1
        if not all(self._seen.values()):
            return MixDecision()
        highest = max(self._reward.values())
        power = {name: math.exp(even * (reward - highest)) for name, reward in self._reward.items()}
        floor = self._even(self._evaluations)
        weights = {name: (1 - number * floor) * weight + floor for name, weight in shares(power).items()}
        return MixDecision(weights, "rewards by training loss")

    def _even(self, evaluations: int) -> float:
        number = len(self._reward)
        return min(1 / number, math.sqrt(math.log(max(number, 2)) / (number * max(evaluations, 1))))

    def state_dict(self) -> dict[str, Any]:
        """The state of weights learned by `exp3`: see `MixPolicy`."""
        return {"reward": dict(self._reward), "seen": dict(self._seen), "evaluations": self._evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of weights learned by `exp3`: see `MixPolicy`."""
        self._reward, self._seen = dict(state["reward"]), dict(state["seen"])
        self._evaluations = state["evaluations"]


class Aioli:
    """Learns how much of each domain's held-out loss an amount of another domain takes away, and moves weights there.

    A round begins with one evaluation per domain, in which that domain has most of the weight (`probe`, the rest even);
    the falls of all held-out losses under these mixtures are solved for a matrix A, of the fall of loss i per share of
    domain j. Then w_j is multiplied by exp(rate * sum_i A_ij), A being divided by its largest entry, and holds for the
    rest of the round. The paper's rounds are shares of the run; here they are counted in evaluations.

    A fall is the difference of two evaluations, so those of a round are of the same held-out batches: other text
    differs by more than a domain is worth. And new weights hold from a block of samples on, so A is solved for the
    mixtures that samples really had between the evaluations.

    Args:
        base: weights of the first round.
        tokens: of each domain's rows.
        probe: weight of the domain that is probed.
        hold: evaluations of a round after its probes.
        rate: of the update.
    """

    name = "aioli"

    def __init__(
        self,
        base: Mapping[str, float],
        tokens: Mapping[str, float],
        probe: float = 0.75,
        hold: int = 8,
        rate: float = 0.2,
    ) -> None:
        self.domains, self.tokens = tuple(base), dict(tokens)
        self.probe, self.hold, self.rate = probe, hold, rate
        self.turn = len(base) + hold
        self._weights = shares(base)
        self._seen = dict.fromkeys(base, 0.0)  # tokens up to the evaluation before
        self._place = 0  # in the round; below the number of domains a probe is under way
        self._before: Weights | None = None
        self._falls: list[tuple[Weights, Weights]] = []  # of each probe the mixture that was seen, and falls of losses

    def decide(self, seen: MixEvaluation) -> MixDecision:
        """Decide learned weights of the domains by `aioli`: see `MixPolicy`."""
        losses = {name: domain.held_out for name, domain in seen.domains.items() if domain.held_out is not None}
        number, before, mixture = len(self.domains), self._before, self._mixture(seen)
        self._before = losses
        if number == 1 or not losses:
            return MixDecision()
        if before is None:
            return self._move(self._probe(0), f"probe of {self.domains[0]}")
        if self._place < number:
            fall = {name: before[name] - losses[name] for name in losses if name in before}
            self._falls.append((mixture, fall))
        self._place += 1
        if self._place < number:
            return self._move(self._probe(self._place), f"probe of {self.domains[self._place]}")
        if self._place == number:
            self._learn()
            return self._move(dict(self._weights), "a round of trials has ended")
        if self._place >= number + self.hold:
            self._place, self._falls = 0, []
            return self._move(self._probe(0), f"probe of {self.domains[0]}")
        return MixDecision()

    def _move(self, weights: Weights, why: str) -> MixDecision:
        return MixDecision(weights, why)

    def _mixture(self, seen: MixEvaluation) -> Weights:
        """The mixture from which `aioli` learns weights: shares of the tokens since the evaluation before."""
        tokens = {name: seen.domains[name].epochs * self.tokens[name] for name in self.domains}
        new = {name: max(0.0, tokens[name] - self._seen[name]) for name in self.domains}
        self._seen = tokens
        return shares(new) if sum(new.values()) else new

    def _probe(self, place: int) -> Weights:
        rest = (1 - self.probe) / (len(self.domains) - 1)
        return {name: self.probe if at == place else rest for at, name in enumerate(self.domains)}

    def _learn(self) -> None:
        """Learn weights by `aioli`: solve falls = mixtures A for A."""
        mixtures = np.array([[mixture[name] for name in self.domains] for mixture, _ in self._falls])
        told = [name for name in self.domains if all(name in fall for _, fall in self._falls)]
        falls = np.array([[fall[name] for name in told] for _, fall in self._falls])
        gains = np.linalg.lstsq(mixtures, falls, rcond=None)[0]  # row j: what a share of domain j takes off each loss
        largest = float(np.abs(gains).max(initial=0.0))
        if largest:
            power = np.exp(self.rate * gains.sum(1) / largest).tolist()
            names = zip(self.domains, power, strict=True)
            self._weights = shares({name: self._weights[name] * factor for name, factor in names})

    def state_dict(self) -> dict[str, Any]:
        """The state of weights learned by `aioli`: see `MixPolicy`."""
        return {
            "weights": self._weights,
            "place": self._place,
            "before": self._before,
            "seen": self._seen,
            "falls": [list(one) for one in self._falls],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of weights learned by `aioli`: see `MixPolicy`."""
        self._weights, self._place, self._seen = dict(state["weights"]), state["place"], dict(state["seen"])
        self._before = None if state["before"] is None else dict(state["before"])
        self._falls = [(dict(mixture), dict(fall)) for mixture, fall in state["falls"]]
