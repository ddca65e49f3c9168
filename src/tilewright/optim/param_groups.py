"""Parameter groups: matrices decay, vectors (norms, biases) do not. Muon has its own for matrices of hidden layers."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups in the model's own order: trainable parameters of two or more dims with decay, the rest without."""
    return _groups([param for param in model.parameters() if param.requires_grad], weight_decay)


def muon_groups(model: nn.Module, matrices: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for `Muon`: the trainable ones of `matrices`, with decay; and those of `decay_groups` for the rest.

    Args:
        model: whose parameters are trained.
        matrices: that Muon updates: `models.base.hidden_matrices`.
        weight_decay: decoupled decay, as a rate.
    """
    chosen = set(matrices)
    trainable = [param for param in model.parameters() if param.requires_grad]
    hidden = {"params": [p for p in trainable if p in chosen], "weight_decay": weight_decay, "muon": True}
    return [hidden, *_groups([p for p in trainable if p not in chosen], weight_decay)]


def _groups(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
