"""How far a layer-major step has got, and what is known of its gradient then."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewright.models.layerwise.view import LayerGroup

NOT_FINITE = "the loss or its gradient is not finite"


class BadStep(Exception):
    """This step's numbers are bad; its text says how."""


@dataclass
class Attempt:
    """A layer-major step so far."""

    factor: float
    """Of the summed loss: one over the number of targets."""
    targets: Sequence[int]
    """Of each micro-batch of this rank."""
    loss_sum: float = math.nan
    norms: dict[Tensor, Tensor] = field(default_factory=dict)
    """Length of each parameter's gradient so far, on the device."""
    skipped: str | None = None
    updated: list[LayerGroup] = field(default_factory=list)
    aux: dict[str, Tensor] = field(default_factory=dict)
    """What the model reports in addition to its loss, summed over the targets of this rank."""

    def norm(self, order: Sequence[Tensor] | None = None) -> float:
        """Norm of the gradient so far, summed up in this order of the parameters. Waits for the device."""
        lengths = [self.norms[param] for param in order or self.norms if param in self.norms]
        return float(torch.linalg.vector_norm(torch.stack(lengths))) if lengths else 0.0
