"""The measure by which models are compared, row by row on the same held-out rows: the rise, and its standard error.

Of text it is the loss, and rises are relative to it. Of images it is the share that a model classifies wrongly, and
rises are differences of shares: 0.01 is one percentage point.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.compress.budget.call_seconds import machine_clock
from tilewright.core.errors import NumericsError
from tilewright.data.batches.microbatches import sums_by_row
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.protocols import LossOutput

_TIMES, _TOKENS = 15, 32
Batches = Mapping[str, Sequence[Mapping[str, Tensor]]]


@dataclass(frozen=True)
class RowLosses:
    """Losses of one model on held-out rows, by domain: sums and numbers of targets, FP64 [N] each.

    Args:
        domains: by name.
        points: sums are of targets that are wrong, and rises are percentage points, not relative.
    """

    domains: Mapping[str, tuple[Tensor, Tensor]]
    points: bool = False

    @property
    def loss(self) -> float:
        """Held-out loss, mean over all targets: nats, or the share that is wrong."""
        sums, counts = self._all()
        return float(sums.sum() / counts.sum())

    def by_domain(self) -> dict[str, float]:
        """Mean held-out loss of each domain, in nats per target."""
        return {name: float(sums.sum() / counts.sum()) for name, (sums, counts) in self.domains.items()}

    def counts(self) -> dict[str, float]:
        """Held-out targets of each domain."""
        return {name: float(counts.sum()) for name, (_, counts) in self.domains.items()}

    def _all(self) -> tuple[Tensor, Tensor]:
        sums, counts = zip(*self.domains.values(), strict=True)
        return torch.cat(sums), torch.cat(counts)

    def rise_over(self, other: "RowLosses") -> tuple[float, float]:
        """Rise of the held-out loss over another model's, and its standard error, by the differences of rows.

        Example:
            >>> counts = torch.tensor([10.0, 10.0])
            >>> a = RowLosses({"x": (torch.tensor([20.0, 30.0]), counts)})
            >>> b = RowLosses({"x": (torch.tensor([22.0, 32.0]), counts)})
            >>> b.rise_over(a)
            (0.08, 0.0)
        """
        (mine, counts), (theirs, _) = self._all(), other._all()
        differences = mine - theirs
        scale = float((counts if self.points else theirs).sum())
        spread = float(differences.std()) if len(differences) > 1 else math.inf
        error = spread * math.sqrt(len(differences)) / scale
        return float(differences.sum()) / scale, error

    def rises_by_domain(self, other: "RowLosses") -> dict[str, float]:
        """Rise of the held-out loss over another model's in each domain."""
        before = other.by_domain()
        return {
            name: loss - before[name] if self.points else loss / before[name] - 1
            for name, loss in self.by_domain().items()
        }


@torch.no_grad()
def row_losses_of(model: Any, batches: Batches) -> RowLosses:
    """Measure a model on held-out rows: its losses, or for an image classifier which rows are wrong.

    Raises:
        NumericsError: one is not finite.
    """
    points = model.task == "image_classification"
    sums_of = _wrong if points else _losses
    with evaluation(model):
        return _by_domain(
            {domain: (sums_of(model, batch) for batch in rows) for domain, rows in batches.items()}, points
        )


def row_losses(outs: Mapping[str, Iterable[tuple[LossOutput, Mapping[str, Tensor]]]]) -> RowLosses:
    """Held-out losses of a model by row.

    Args:
        outs: by domain, of each micro-batch what a model makes of it, and the micro-batch.

    Raises:
        NumericsError: one is not finite.
    """
    return _by_domain({domain: (_sums(out, batch) for out, batch in of) for domain, of in outs.items()}, points=False)


def _by_domain(parts: Mapping[str, Iterable[tuple[Tensor, Tensor]]], points: bool) -> RowLosses:
    """Collect the held-out loss sums and counts of micro-batches by domain; rows without targets are left out."""
    found = {}
    for domain, of_batches in parts.items():
        sums, counts = (torch.cat(part).double() for part in zip(*of_batches, strict=True))
        if (kept := counts > 0).any():
            found[domain] = (sums[kept], counts[kept])
    if not all(bool(torch.isfinite(sums).all()) for sums, _ in found.values()):
        raise NumericsError(
            "Held-out loss is not finite",
            got="NaN or infinite losses or logits of a model after a cut, or of the run itself",
            need="finite weights",
            try_="an earlier checkpoint of the run, or a smaller cut",
        )
    return RowLosses(found, points)


def _losses(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return _sums(model.loss(batch), batch)


def _sums(out: LossOutput, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    assert out.each is not None
    return sums_by_row(out.each.double(), batch)


def _wrong(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits_BC, labels_B = model.image_logits(batch["pixel_values"]), batch["labels"]
    wrong_B = (logits_BC.argmax(-1) != labels_B).double()
    finite_B = torch.isfinite(logits_BC).all(-1)
    return wrong_B.masked_fill(~finite_B, math.nan), torch.ones_like(labels_B)


@torch.no_grad()
def seconds_beside(model: Any, other: Any) -> tuple[float, float]:
    """Measure seconds of a forward pass of two models over a few tokens or images. `other` has its least; `model` has
    that times the median ratio of passes in turn, since a machine's speed drifts by more than the passes of one pair
    differ. On one thread the clock is the thread's own processor time (`machine_clock`)."""
    _, clock = machine_clock()
    ratios, least = [], math.inf

    def seconds(one: Any) -> float:
        began = clock()
        _pass(one)
        return clock() - began

    with evaluation(model), evaluation(other):
        for turn in range(_TIMES + 1):
            ours, theirs = seconds(model), seconds(other)
            if turn:  # the first prepares kernels
                ratios.append(ours / max(theirs, 1e-9))
                least = min(least, theirs)
    return statistics.median(ratios) * least, least


def _pass(model: Any) -> Tensor:
    if model.task == "image_classification":
        return model.image_logits(model.short_batch()["pixel_values"])
    tokens = min(_TOKENS, model.max_positions or _TOKENS)
    return model.next_token_logits(torch.zeros(1, tokens, dtype=torch.int64))


def parameters(model: Any) -> int:
    """Count a model's parameters, tied ones once."""
    return sum(param.numel() for param in model.parameters())


Say = Callable[[str], object]
