"""The question to a consumer of an image classifier: the logits of held-out images.

In the question's folder they are `pixels.npy` [N, 3, H, W] FP32, as batches have them.

Legend: N images.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_FILE = "pixels.npy"
_AT_ONCE = 32


@dataclass(frozen=True)
class ImageQuestion:
    """Held-out images.

    Args:
        pixels_N3HW: FP32.
    """

    pixels_N3HW: np.ndarray

    def save(self, folder: Path) -> None:
        """Write the file of an image question; `folder` exists."""
        np.save(folder / _FILE, self.pixels_N3HW)

    @classmethod
    def load(cls, folder: Path) -> "ImageQuestion | None":
        """Read the image question that `save` wrote; None where the question is of text."""
        path = folder / _FILE
        return cls(np.load(path, allow_pickle=False)) if path.is_file() else None

    def batches(self) -> Iterator[np.ndarray]:
        """The images of a question, some at once."""
        for start in range(0, len(self.pixels_N3HW), _AT_ONCE):
            yield self.pixels_N3HW[start : start + _AT_ONCE]
