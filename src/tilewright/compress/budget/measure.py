"""Held-out loss row by row, so that two models are compared on the same rows: the rise, and its standard error."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.core.errors import NumericsError
from tilewright.data.batches.microbatches import sums_by_row
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.protocols import LossOutput

_TIMES, _TOKENS = 7, 32
Batches = Mapping[str, Sequence[Mapping[str, Tensor]]]


@dataclass(frozen=True)
class RowLosses:
    """Of one model on held-out rows, by domain: sums and numbers of targets, FP64 [N] each."""

    domains: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def loss(self) -> float:
        """Mean over all targets, nats."""
        sums, counts = self._all()
        return float(sums.sum() / counts.sum())

    def by_domain(self) -> dict[str, float]:
        """The same of each domain."""
        return {name: float(sums.sum() / counts.sum()) for name, (sums, counts) in self.domains.items()}

    def _all(self) -> tuple[Tensor, Tensor]:
        sums, counts = zip(*self.domains.values(), strict=True)
        return torch.cat(sums), torch.cat(counts)

    def rise_over(self, other: "RowLosses") -> tuple[float, float]:
        """Relative rise of the loss over another model's, and its standard error, by the differences of rows.

        Example:
            >>> counts = torch.tensor([10.0, 10.0])
            >>> a = RowLosses({"x": (torch.tensor([20.0, 30.0]), counts)})
            >>> b = RowLosses({"x": (torch.tensor([22.0, 32.0]), counts)})
            >>> b.rise_over(a)
            (0.08, 0.0)
        """
        (mine, _), (theirs, _) = self._all(), other._all()
        differences = mine - theirs
        spread = float(differences.std()) if len(differences) > 1 else math.inf
        error = spread * math.sqrt(len(differences)) / float(theirs.sum())
        return float(differences.sum()) / float(theirs.sum()), error


@torch.no_grad()
def row_losses_of(model: Any, batches: Batches) -> RowLosses:
    """Losses of a model's held-out rows.

    Raises:
        NumericsError: one is not finite.
    """
    with evaluation(model):
        return row_losses({domain: ((model.loss(batch), batch) for batch in rows) for domain, rows in batches.items()})


def row_losses(outs: Mapping[str, Iterable[tuple[LossOutput, Mapping[str, Tensor]]]]) -> RowLosses:
    """Losses by row.

    Args:
        outs: by domain, of each micro-batch what a model makes of it, and the micro-batch.

    Raises:
        NumericsError: one is not finite.
    """
    found = {}
    for domain, of_domain in outs.items():
        parts = []
        for out, batch in of_domain:
            assert out.each is not None
            parts.append(sums_by_row(out.each.double(), batch))
        kept = torch.cat([counts for _, counts in parts]) > 0
        if kept.any():
            sums, counts = (torch.cat(part)[kept].double() for part in zip(*parts, strict=True))
            found[domain] = (sums, counts)
    if not all(bool(torch.isfinite(sums).all()) for sums, _ in found.values()):
        raise NumericsError(
            "Held-out loss is not finite",
            got="NaN or infinite losses of a model after a cut, or of the run itself",
            need="finite weights",
            try_="an earlier checkpoint of the run, or a smaller cut",
        )
    return RowLosses(found)


@torch.no_grad()
def seconds_beside(model: Any, other: Any) -> tuple[float, float]:
    """Least seconds of a forward pass of each over a few tokens, in turn: a busy machine adds to both, and to the least
    of several least."""
    ids_BS = torch.zeros(1, _TOKENS, dtype=torch.int64)
    times: tuple[list[float], list[float]] = ([], [])
    with evaluation(model), evaluation(other):
        for turn in range(_TIMES + 1):
            for kept, one in zip(times, (model, other), strict=True):
                began = time.perf_counter()
                one.next_token_logits(ids_BS)
                if turn:  # the first prepares kernels
                    kept.append(time.perf_counter() - began)
    return min(times[0]), min(times[1])


def parameters(model: Any) -> int:
    """Of a model, tied ones once."""
    return sum(param.numel() for param in model.parameters())


Say = Callable[[str], object]
