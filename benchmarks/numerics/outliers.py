"""Features that FP8 tiles cannot carry beside others, planted in a model without changing what it computes in BF16.

The first feature of each tile of 128 is a million times larger than the others, and read by weights that are zero, as
massive activations of large models nearly are. In FP8 the forward matmuls lose all other features of such a tile.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tilewright.models.decoder.block import Block
from tilewright.models.decoder.decoder import Decoder

OUTLIER = 2.0**20


def plant_everywhere(model: Decoder) -> None:
    """Before attention and before the MLP of all layers."""
    for block in model.blocks:
        plant_before_attention(block)
        plant_before_mlp(block)


def plant_before_attention(block: Block) -> None:
    """In what query, key and value projections read."""
    attn = block.self_attn
    _plant(block.input_layernorm, (attn.q_proj, attn.k_proj, attn.v_proj))


def plant_before_mlp(block: Block) -> None:
    """In what the gate and up projections read."""
    _plant(block.post_attention_layernorm, (block.mlp.gate_proj, block.mlp.up_proj))


@torch.no_grad()
def _plant(norm: nn.Module, readers: Iterable[nn.Linear]) -> None:
    """A norm's weight of 2^20 for the first feature of each tile; what reads it has zeros there, and keeps them."""
    norm.weight[::128] = OUTLIER
    norm.weight.register_hook(_without_outliers)
    for reader in readers:
        reader.weight[:, ::128] = 0.0
        reader.weight.register_hook(_without_outliers)


def _without_outliers(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[..., ::128] = 0.0
    return grad
