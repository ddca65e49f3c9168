"""Direct preference optimization: the loss of a pair of answers, of which one is preferred.

loss = -log sigmoid(beta * ((log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected)))), where p is the
model and q the one that training began with ("Direct Preference Optimization", Rafailov et al. 2023, equation 7). A
log probability is the sum over an answer's tokens.

Legend: B pairs  S positions.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.models.base.protocols import LossOutput

REFERENCE = "reference"
"""Of a batch of pairs: log probabilities [B, 2] of the answers before training; `beta` [B] and `rows` [B] are beside
it."""


TOLD = ("accuracy", "margin")
"""What the loss of pairs tells in addition."""


def is_pairs(batch: Mapping[str, Tensor]) -> bool:
    """True if a batch holds preferences, pairs of answers: input_ids and the like are [B, 2, S], chosen first."""
    return REFERENCE in batch


def as_rows(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arrange the answers of a batch of preference pairs as rows [2 B, S], pair after pair."""
    return {name: tensor.flatten(0, 1) for name, tensor in batch.items() if tensor.dim() == 3}


def rows_of(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Rows of a batch, of preferences perhaps, as a model runs on it: `as_rows` of pairs, any other as it is."""
    return as_rows(batch) if is_pairs(batch) else batch


def preference_loss(losses: Sequence[Tensor], batch: Mapping[str, Tensor]) -> LossOutput:
    """Preference loss (DPO) summed over pairs.

    Args:
        losses: of the rows of `as_rows`, each a scalar: cross-entropy summed over the answer's tokens.
        batch: of pairs.

    Returns:
        Loss, number of pairs, and two means over pairs: `margin`, by how much the difference of log probabilities has
        moved towards the chosen answer, times beta; `accuracy`, the share of pairs in which it moved there.

    Example:
        >>> given = {"reference": torch.tensor([[-3.0, -3.0]]), "beta": torch.tensor([0.5]), "rows": torch.tensor([7])}
        >>> out = preference_loss([torch.tensor(2.0), torch.tensor(4.0)], given)
        >>> round(float(out.loss_sum), 4), float(out.aux["margin"])
        (0.3133, 1.0)
    """
    moved_B2 = -torch.stack(list(losses)).float().view(-1, 2) - batch[REFERENCE]
    margin_B = batch["beta"] * (moved_B2[:, 0] - moved_B2[:, 1])
    real_B = batch["rows"] >= 0
    count = real_B.sum()
    loss_B = -F.logsigmoid(margin_B) * real_B
    shown_B = margin_B.detach() * real_B
    pairs = count.clamp_min(1)
    aux = {"margin": shown_B.sum() / pairs, "accuracy": (shown_B > 0).sum() / pairs}
    return LossOutput(loss_B.sum(), count, aux, loss_B.detach())
