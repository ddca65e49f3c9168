"""Experts of a layer that is compiled as a whole: they run uncompiled, because their shapes depend on the data.

A module of its own because the decorator imports torch's compiler, which takes seconds: `moe` imports it while
something is compiled.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tilewright.models.moe import MoE


@torch.compiler.disable
def run_experts(moe: "MoE", x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
    """See `MoE.run_experts`."""
    return moe.run_experts(x_ND, weights_NK, experts_NK)
