"""Sums of losses by domain, which come out the same in whatever order they are added, and on any number of ranks.

A row's loss is added in units of 2^-20 nats, as an integer: integers have no rounding that depends on the order.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

_UNITS = 1 << 20


class DomainSums:
    """Sums of a step, by domain: the losses of its rows, their targets, and the rows whose loss was not finite.

    Args:
        domains: in the mixture's order.
    """

    def __init__(self, domains: tuple[str, ...]) -> None:
        self.domains = domains
        self.counts = np.zeros((3, len(domains)), np.int64)
        """Units of loss, targets, rows that are not finite; by domain. Sums over ranks are sums of these."""

    def add(self, domain_R: np.ndarray, loss_R: np.ndarray, targets_R: np.ndarray) -> None:
        """Add the losses of a step's rows by domain.

        Args:
            domain_R: place of each row's domain, -1 for none.
            loss_R: sum of the losses of a row's targets, in nats.
            targets_R: their number.

        Example:
            >>> sums = DomainSums(("code", "docs"))
            >>> sums.add(np.array([1, 0, 1, -1]), np.array([6.0, 2.0, 3.0, 0.0]), np.array([2, 1, 1, 0]))
            >>> sums.means()
            {'code': 2.0, 'docs': 3.0}
        """
        good_R = np.isfinite(loss_R)
        here_R = (domain_R >= 0) & good_R & (targets_R > 0)
        units_R = np.rint(np.where(good_R, loss_R, 0.0).astype(np.float64) * _UNITS).astype(np.int64)
        np.add.at(self.counts[0], domain_R[here_R], units_R[here_R])
        np.add.at(self.counts[1], domain_R[here_R], targets_R[here_R])
        np.add.at(self.counts[2], domain_R[(domain_R >= 0) & ~good_R], 1)

    def means(self) -> dict[str, float]:
        """The mean loss of each domain that had targets, in nats; not a number if a row's loss was none."""
        units, targets, bad = self.counts.tolist()
        found = zip(self.domains, units, targets, bad, strict=True)
        return {name: unit / _UNITS / count if not b else float("nan") for name, unit, count, b in found if count or b}

    def targets(self) -> dict[str, int]:
        """Targets of each domain that the means are of."""
        return dict(zip(self.domains, self.counts[1].tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The sums of losses by domain as plain JSON."""
        return {"counts": self.counts.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums of losses by domain from `state_dict()`."""
        self.counts = np.array(state["counts"], np.int64).reshape(3, len(self.domains))
