"""Parameter groups: matrices decay, vectors (norms, biases) do not."""

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups in the model's own order: trainable parameters of two or more dims with decay, the rest without."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
