"""Stacked experts of a layer that is compiled as a whole: they run uncompiled, because their shapes depend on the data.

A module of its own because the decorator imports torch's compiler, which takes seconds: `own_weights` imports it while
something is compiled.
"""

from typing import Any

import torch
from torch import Tensor


@torch.compiler.disable
def run_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """See `own_weights`."""
    return experts.run_experts(hidden_states, top_k_index, top_k_weights)
