"""Graphs with integer weights for runtimes that are given torch modules: ExecuTorch in 4 bits.

Legend: V vocabulary  D model width  S positions.
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewright.formats.integer import IntegerTensor

GROUP = 32
"""Weights that share a scale in 4 bits: the smallest that XNNPACK computes with."""


class Int8Embedding(nn.Module):
    """A table in INT8, symmetric with a scale per row; rows are dequantised as they are looked up."""

    scale: Tensor
    codes: Tensor

    def __init__(self, weight_VD: Tensor):
        super().__init__()
        scale_V1 = weight_VD.abs().amax(1, keepdim=True) / 127
        scale_V1 = torch.where(scale_V1 == 0, 1.0, scale_V1)
        self.register_buffer("scale", scale_V1)
        self.register_buffer("codes", (weight_VD / scale_V1).round().to(torch.int8))

    def forward(self, ids_1S: Tensor) -> Tensor:
        """Quantised embedding of a graph, INT8: [1, S] -> [1, S, D] FP32."""
        return self.codes[ids_1S].float() * self.scale[ids_1S]


def why_not_8da4w(graph: nn.Module) -> str | None:
    """Why a graph's linear layers cannot be quantised in groups of 4 bits; None where at least one can."""
    return None if any(map(_fits, graph.modules())) else f"no linear layer's input is a multiple of {GROUP} wide"


def quantize_8da4w(
    graph: nn.Module, codes: Mapping[str, IntegerTensor] | None = None
) -> tuple[nn.Module, dict[str, int]]:
    """A quantised copy of a graph with linear layers in 4 bits by groups of `GROUP`, activations in INT8 per token, the
    embedding in INT8.

    Args:
        graph: of `graph_of`.
        codes: of some linear layers, by their names in the graph, taken as they are; others are rounded by torchao.

    Returns:
        The copy, and its layers by format.
    """
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_  # pyright: ignore[reportMissingImports]
    from torchao.quantization.granularity import PerGroup  # pyright: ignore[reportMissingImports]

    quantized = copy.deepcopy(graph)
    linears = [module for module in quantized.modules() if isinstance(module, nn.Linear)]
    four = [linear for linear in linears if _fits(linear)]
    for linear in four:  # a tied head leaves the embedding's weight as it is
        linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    tables = [
        (parent, name, table)
        for parent in list(quantized.modules())
        for name, table in parent.named_children()
        if isinstance(table, nn.Embedding)
    ]
    for parent, name, table in tables:
        setattr(parent, name, Int8Embedding(table.weight.detach()))
    int4 = torch.int4  # pyright: ignore[reportAttributeAccessIssue]  # torch declares only some of its dtypes
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=PerGroup(GROUP))
    quantize_(quantized, config, filter_fn=lambda module, _: _fits(module))
    for name, found in (codes or {}).items():
        weight = cast(Any, quantized.get_submodule(name).weight).data
        weight.qdata.copy_(found.codes)
        weight.scale.copy_(found.scale)
        weight.zero_point.zero_()
    counts = {"int4": len(four), "int8": len(tables), "fp32": len(linears) - len(four)}
    return quantized, {name: count for name, count in counts.items() if count}


def _fits(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features % GROUP == 0
