"""Which layers share the 8-bit copies of one input, and which module makes these together with the input."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from tilewright.precision.float8.experts import ExpertRunner, groupable
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.float8.gemm.input_cache import InputShare
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.quantizing_layers import QuantizingNorm, QuantizingSwiGLU


def share_inputs(model: nn.Module) -> None:
    """Wire layers that read one input to share its quantised copies.

    Modules of our own models name the only readers of what they make (`quantized_readers`) and hand the copies over
    with it; elsewhere layers side by side, such as query, key and value, find each other's copies.
    """
    for parent in model.modules():
        known = hasattr(parent, "readers")
        layers = [
            child
            for child in (cast(Any, parent).readers() if known else parent.children())
            if isinstance(child, Float8Linear | FrozenFloat8Linear)
        ]
        # Elsewhere not all of the layers side by side read one input.
        share = InputShare(len(layers) if known else 0) if len(layers) > 1 else None
        for layer in layers:
            layer.share = share
        if share is not None and not known and _end_sharing not in parent._forward_hooks.values():
            parent.register_forward_hook(_end_sharing, always_call=True)
    for module in model.modules():
        own = cast(Any, module)
        for maker, fused, readers in own.quantized_readers() if hasattr(module, "quantized_readers") else ():
            maker.quantizing = None
            if all(isinstance(reader, Float8Linear) and _reads_both(reader, readers[0]) for reader in readers):
                kind = QuantizingNorm if fused == "norm" else QuantizingSwiGLU
                maker.quantizing = kind(readers[0].kernels, readers[0].operand_formats.input)


def _end_sharing(module: nn.Module, args: Any, output: Any) -> None:
    """End the wiring of shared copies with the parent's forward, whether or not all of its layers took them."""
    if torch.compiler.is_compiling():
        return
    for child in module.children():
        if isinstance(child, Float8Linear | FrozenFloat8Linear) and child.share is not None:
            child.share.forget()


def _reads_both(reader: Float8Linear, first: Float8Linear) -> bool:
    """True if a layer takes both copies of the shared input, by rows, in the format of the first reader.

    A layer that keeps its input itself takes the row-wise copy alone, so it quantises that.
    """
    both = reader.row_copy and not reader.keep_value
    return both and reader.operand_formats.input.in_rows and reader.operand_formats.input == first.operand_formats.input


def group_experts(model: nn.Module) -> None:
    """Let experts whose FP8 layers agree run as one grouped operation."""
    for module in cast(Iterable[Any], model.modules()):
        if "expert_runner" in vars(module):
            module.expert_runner = ExpertRunner() if groupable(list(module.experts)) else None
