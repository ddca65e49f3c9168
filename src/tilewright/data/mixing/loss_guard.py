"""`ppl_guard`: a domain whose held-out loss rises gets more of the data, until it has recovered.

The articles raise a domain's weight by 15 % after three rises of its perplexity. Taken as it stands that rule fires on
noise, feeds a domain that is overfitted (its held-out loss rises because its rows were seen too often, and more of them
make it worse), and has no way back. Here a rise counts above the measured noise only (`loss_rise`), a domain that is
overfitted is refused with the reason, weights rest after a move, have a largest ratio, and go back step by step.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tilewright.data.mixing.loss_rise import Rise
from tilewright.data.mixing.mixing_policy import DomainSeen, MixDecision, MixEvaluation, Refusal, shares

_KEPT = 16  # evaluations whose training losses are kept


class PplGuard:
    """Gives a domain whose held-out loss rises more of the data, until it has recovered.

    Args:
        base: weights that ratios are of.
        boost: factor of a weight at a rise.
        patience, noise: see `Rise`.
        cooldown: evaluations after a move of a domain in which its rises do not count.
        max_ratio: largest ratio of a weight to its base, before all are divided by their sum.
        calm: evaluations without a rise after which one `boost` is taken back.
    """

    name = "ppl_guard"
    turn = 1

    def __init__(
        self,
        base: Mapping[str, float],
        *,
        boost: float = 1.15,
        patience: int = 3,
        noise: float = 3.5,
        cooldown: int = 5,
        max_ratio: float = 2.0,
        calm: int = 20,
    ) -> None:
        self.base = shares(base)
        self.boost, self.cooldown, self.max_ratio, self.calm = boost, cooldown, max_ratio, calm
        self._watches = {name: Rise(patience, noise) for name in base}
        self._ratio = dict.fromkeys(base, 1.0)
        self._rests = dict.fromkeys(base, 0)
        self._quiet = dict.fromkeys(base, 0)
        self._trained: dict[str, list[float]] = {name: [] for name in base}

    def decide(self, seen: MixEvaluation) -> MixDecision:
        """Raise the weights of domains whose held-out loss rises: see `MixPolicy`."""
        told, refused, before = list[str](), list[Refusal](), dict(self._ratio)
        for name, domain in seen.domains.items():
            if domain.trained is not None:
                self._trained[name] = [*self._trained[name], domain.trained][-_KEPT:]
            if domain.held_out is None:
                continue
            rise = self._watches[name].watch(domain.held_out)
            if self._rests[name]:
                self._rests[name] -= 1
            elif rise is not None:
                self._answer(name, domain, rise, told, refused)
            else:
                self._recover(name, told)
        if self._ratio == before:
            return MixDecision(refused=tuple(refused))
        weights = shares({name: weight * self._ratio[name] for name, weight in self.base.items()})
        return MixDecision(weights, "; ".join(told), tuple(refused))

    def _answer(self, name: str, domain: DomainSeen, rise: float, told: list[str], refused: list[Refusal]) -> None:
        self._quiet[name], self._rests[name] = 0, self.cooldown
        if (why := overfitted(rise, self._trained[name], domain.epochs, self._watches[name].patience)) is not None:
            refused.append(Refusal(name, f"held-out loss rose by {rise:.3f}, but {why}: it is overfitted"))
        elif self._ratio[name] * self.boost > self.max_ratio:
            got = f"held-out loss rose by {rise:.3f}, but its weight has {self._ratio[name]:.2f} of its base"
            refused.append(Refusal(name, f"{got}, and {self.max_ratio:g} is the largest ratio"))
        else:
            self._ratio[name] *= self.boost
            told.append(f"{name}: held-out loss rose by {rise:.3f} nats, weight times {self.boost:g}")

    def _recover(self, name: str, told: list[str]) -> None:
        """Take one step back towards the given weights, after a domain has been without a rise for long enough."""
        self._quiet[name] += 1
        if self._ratio[name] > 1 and self._quiet[name] >= self.calm:
            self._quiet[name] = 0
            self._ratio[name] = max(1.0, self._ratio[name] / self.boost)
            told.append(f"{name}: no rise in {self.calm} evaluations, weight divided by {self.boost:g}")

    def state_dict(self) -> dict[str, Any]:
        """The state of the perplexity guard: see `MixPolicy`."""
        return {
            name: {
                "watch": self._watches[name].state_dict(),
                "ratio": self._ratio[name],
                "rests": self._rests[name],
                "quiet": self._quiet[name],
                "trained": self._trained[name],
            }
            for name in self.base
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the perplexity guard: see `MixPolicy`."""
        for name in self.base:
            kept = state[name]
            self._watches[name].load_state_dict(kept["watch"])
            self._ratio[name], self._rests[name], self._quiet[name] = kept["ratio"], kept["rests"], kept["quiet"]
            self._trained[name] = list(kept["trained"])


def overfitted(rise: float, trained: Sequence[float], epochs: float, patience: int) -> str | None:
    """Explain why a rise of the held-out loss is overfitting and not forgetting; None: it is forgetting.

    What was forgotten is as new to the training loss. A domain that has been repeated is asked for more: its training
    loss must have risen by half of what the held-out loss did.

    Args:
        rise: of the held-out loss.
        trained: training losses of the last evaluations, the last one last.
        epochs: times that the domain's rows were trained on.
        patience: evaluations that the rise was seen in.

    Example:
        >>> overfitted(0.2, [2.0, 1.99, 1.98, 1.97, 1.96, 1.95, 1.94], 0.5, 3)
        'its training loss fell by 0.035'
        >>> overfitted(0.2, [2.0, 2.0, 2.0, 2.0, 2.2, 2.2, 2.2], 3.0, 3) is None
        True
    """
    repeated = epochs > 1
    before, now = trained[:-patience], trained[-patience:]
    if len(before) < patience:
        return f"its rows were seen {epochs:.1f} times and its training loss is not known" if repeated else None
    change = sum(now) / len(now) - sum(before) / len(before)
    differences = [b - a for a, b in pairwise(trained)]
    noise = (sum(d * d for d in differences) / len(differences) / 2) ** 0.5
    if change < -noise * (1 / len(now) + 1 / len(before)) ** 0.5:
        return f"its training loss fell by {-change:.3f}"
    if repeated and change < rise / 2:
        return f"its rows were seen {epochs:.1f} times and its training loss changed by {change:+.3f}"
    return None
