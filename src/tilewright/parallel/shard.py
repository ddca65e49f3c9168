"""A model cut over ranks by torch's FSDP2: layer by layer, then what is outside of the layers.

    convert(model, policy)  # first: dtypes of parameters are settled before they are cut
    shard(model, model.layers, world.fsdp_mesh, Sharding())

Each rank keeps its part of each parameter, of its gradient and of the optimizer's states (DTensors, `Shard(0)`). A
layer's parameters are gathered before its forward pass and again before its backward pass. Gradients are summed over
the ranks, never averaged: a loss is divided by the targets of all ranks before backward (`executor.standard`).

ZeRO's stages in FSDP2's terms: 3 is `reshard_after_forward`; 2 is without it (a layer's parameters stay gathered
from forward to backward); 1 is 2 with gradients that are reduced once per step (`executor.standard`, `reduce="step"`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded."""

    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass. False keeps them until its backward pass is done."""
    cpu_offload: bool = False
    """Keep parts of parameters, gradients and states in host memory, where the update runs too."""


def shard(model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, sharding: Sharding) -> None:
    """Cut a model over the ranks of a mesh, in place."""
    raise NotImplementedError
