"""Activation checkpointing of a layer: keep everything, keep the expensive results, or recompute it whole.

All three give bitwise the same loss and gradients on a CPU; they trade memory for recomputation. Called by
`decoder.Block` and `hf`. Not the saving of runs to disk (`training.checkpoint`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tilewright.models.config import ActivationCheckpoint

_aten = torch.ops.aten
KEPT_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
"""What `selective` keeps: the outputs of matrix products and attention. The rest is cheap to compute again."""

selective_contexts = functools.partial(create_selective_checkpoint_contexts, list(KEPT_OPS))
"""`context_fn` of torch.utils.checkpoint for `selective`."""


def run_checkpointed(mode: ActivationCheckpoint, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), keeping for backward what `mode` says.

    Inside a compiled layer the same call guides the compiler's own choice of what to save.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return function(*args)
    if mode == "full":
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=selective_contexts)
