"""Loss and perplexity on held-out batches, by domain, weighted by targets and forced to FP32 where asked.

The model is left as it was found: mode, precision, gradients and generators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.core.units import perplexity
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.protocols import TrainableModel
from tilewright.precision.convert import evaluating
from tilewright.training.executor.standard import Batch, count_targets, to_device


@dataclass(frozen=True)
class DomainLoss:
    """Held-out result of one domain: mean loss in nats a target, its exponential (infinite from a loss of
    709.8), and the targets it is the mean of."""

    loss: float
    ppl: float
    tokens: int

    def to_json(self) -> dict[str, float]:
        """The metrics.jsonl form."""
        return {"loss": self.loss, "ppl": self.ppl, "tokens": self.tokens}


@torch.no_grad()
def evaluate(
    model: TrainableModel,
    batches: Mapping[str, Sequence[Batch]],
    *,
    device: torch.device | str = "cpu",
    fp32: bool = True,
) -> dict[str, DomainLoss]:
    """Evaluate a model on the batches of each domain.

    Args:
        model: in any mode; it is in evaluation mode inside and comes back as it was.
        batches: by domain; a domain without targets is left out of the result.
        device: where batches are moved.
        fp32: compute in FP32 whatever the model's precision (a converted model only).
    """
    with evaluating(model) if fp32 else evaluation(model):
        results = {domain: _domain(model, rows, torch.device(device)) for domain, rows in batches.items()}
    return {domain: result for domain, result in results.items() if result is not None}


def pooled(results: Mapping[str, DomainLoss]) -> DomainLoss | None:
    """All domains as one, weighted by targets; None without any.

    Example:
        >>> pooled({"a": DomainLoss(1.0, 2.718, 1), "b": DomainLoss(4.0, 54.6, 2)}).loss
        3.0
    """
    tokens = sum(result.tokens for result in results.values())
    if tokens == 0:
        return None
    return _result(sum(result.loss * result.tokens for result in results.values()), tokens)


def _domain(model: TrainableModel, batches: Sequence[Batch], device: torch.device) -> DomainLoss | None:
    tokens = count_targets(batches)
    if tokens == 0:
        return None
    total = torch.zeros((), dtype=torch.float32 if device.type != "cpu" else torch.float64, device=device)
    for batch in batches:
        total += model.loss(to_device(batch, device)).loss_sum
    return _result(float(total), tokens)


def _result(loss_sum: float, tokens: int) -> DomainLoss:
    loss = loss_sum / tokens
    return DomainLoss(loss, perplexity(loss), tokens)
