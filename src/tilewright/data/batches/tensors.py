"""Arrays of a batch as tensors, the only place of `data` that needs torch, and only where a batch is made: preparing
data, and asking what is in it, start a second sooner without.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

Batch = dict[str, "torch.Tensor"]


def as_tensors(arrays: Mapping[str, np.ndarray]) -> Batch:
    """A batch's arrays as tensors that share their memory."""
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}
