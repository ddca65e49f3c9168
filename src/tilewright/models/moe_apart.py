"""Experts of a layer that is compiled as a whole: they run uncompiled, because their shapes depend on the data.

A module of its own because the decorator imports torch's compiler, which takes seconds: `moe` imports it while
something is compiled.
"""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.compiler.disable
def run_eager(run: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """`run(x, weights, experts)` outside of compiled code."""
    return run(x, weights, experts)
