"""Error feedback: what a wire format has lost of a gradient is added to the next one, so that nothing is lost for good.

    x += feedback.owed("bucket 0", x)
    packed = pack(x, wire, kernels)
    feedback.keep("bucket 0", x - unpack(packed, ...))
    feedback.commit()  # the step has changed the weights; a step that has not calls `forget`

Each rank keeps what it has lost itself, BF16, as large as the gradients that it sends: 2 bytes per parameter of the
whole model, and as much again until the step is through. A loss that is not finite is forgotten, so that a step that is
skipped harms no later one. A tensor of another size (some parameters are frozen now) begins without a loss.

See: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

DTYPE = torch.bfloat16
"""Of what is kept: rounding it loses 2^-8 of a loss that is 2^-4 of a value at most."""


class ErrorFeedback:
    """Error feedback: the part of gradients that this rank's exchanges in a wire format have lost, by name."""

    def __init__(self) -> None:
        self.scale = 1.0
        """Loss scale of the gradients now, a power of two; what is kept is without it."""
        self._kept: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}

    def owed(self, name: str, like: Tensor) -> Tensor:
        """The error feedback to add to a tensor before it is encoded: FP32 of its shape, zeros at first.

        Args:
            name: of what is sent, the same in each step.
            like: what is sent.
        """
        kept = self._new.get(name, self._kept.get(name))
        if kept is None or kept.numel() != like.numel():
            return torch.zeros_like(like)
        return kept.to(device=like.device, dtype=torch.float32).view_as(like) * self.scale

    def keep(self, name: str, lost: Tensor) -> None:
        """Keep as error feedback what the wire format lost of a gradient in this step.

        Args:
            name: as `owed` was asked.
            lost: FP32; where it is not finite, it counts as nothing.
        """
        self._new[name] = torch.nan_to_num(lost / self.scale, nan=0.0, posinf=0.0, neginf=0.0).to(DTYPE).flatten()

    def commit(self) -> None:
        """Commit the error feedback of this step's gradients, which have changed the weights."""
        self._kept |= self._new
        self._new = {}

    def forget(self) -> None:
        """Forget the error feedback of this step, whose gradients have not changed the weights. It is again what it was
        before the step."""
        self._new = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the error feedback that are kept."""
        return sum(tensor.nbytes for part in (self._kept, self._new) for tensor in part.values())

    def tensors(self) -> Mapping[str, Tensor]:
        """The error feedback's tensors between steps, by name: part of a checkpoint."""
        return dict(self._kept)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the error feedback from `tensors()`."""
        self._kept, self._new = dict(tensors), {}
