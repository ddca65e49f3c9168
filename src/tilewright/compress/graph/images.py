"""A Hugging Face image classifier as a graph: pixels of any number of images of one size in, logits out.

Legend: B images  C classes.
"""

import copy

from torch import Tensor, nn

from tilewright.models.hf.model import HFModel


class ImageGraph(nn.Module):
    """A transformers model in FP32 on the CPU.

    Args:
        model: an image classifier. Copied.
        size: side of its images in pixels.
    """

    kept = ()
    """Nothing: an image is no row of tokens; see `decoder.DecoderGraph`."""

    def __init__(self, model: HFModel, size: int):
        super().__init__()
        self.net = copy.deepcopy(model.net).float().eval().requires_grad_(False)
        self.shape = (int(model.config.num_channels), size, size)

    def forward(self, pixels_B3HW: Tensor) -> tuple[Tensor]:
        """Run an image classifier as a graph: pixels [B, 3, H, W] FP32, as a batch has them -> logits [B, C]."""
        return (self.net(pixel_values=pixels_B3HW).logits,)
