"""Executors by name, and what each can do.

Whoever must know how a step is run asks for a capability and never compares a name; a contract test holds that. A new
executor is a name, a row of capabilities, and a factory (`training.executor.executor_kinds`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ExecutorName = Literal["standard", "layer_major", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of an executor: models, gradients and bytes that it supports.

    Example:
        >>> capabilities_of("standard").shard, capabilities_of("layer_major").offload
        (True, True)
    """

    whole_model: bool
    """Calls the model's own `loss`: models without a list of layers, and losses of several rows together, as of pairs.
    Else the model is run layer by layer (`models.layerwise`)."""
    one_micro_batch: bool
    """One micro-batch is under way at a time. Else all of them pass a layer before the next layer."""
    whole_gradient: bool
    """The whole gradient exists before the first update, so it can be unscaled, and computed again in other formats.
    Else each layer group is updated in the backward pass: its norm takes a second pass, or is that of a step before."""
    activation_checkpoint: bool
    """Each layer keeps what `train.activation_checkpoint` says. Else a layer is kept whole or recomputed."""
    offload: bool
    """Parameters, optimizer states and layer inputs may be stored off the device, by layer group (`memory.offload_*`).
    They get their first bytes there."""
    shard: bool
    """Parameters may be sharded over ranks (`parallel.dp_shard`)."""
    adapters: bool
    """Trains adapters on frozen weights (`lora.rank`)."""
    stages: bool
    """Layers may be on different ranks (`parallel.pp`)."""


CAPABILITIES: Mapping[ExecutorName, Capabilities] = MappingProxyType(
    {
        "standard": Capabilities(
            whole_model=True,
            one_micro_batch=True,
            whole_gradient=True,
            activation_checkpoint=True,
            offload=False,
            shard=True,
            adapters=True,
            stages=False,
        ),
        "layer_major": Capabilities(
            whole_model=False,
            one_micro_batch=False,
            whole_gradient=False,
            activation_checkpoint=False,
            offload=True,
            shard=False,
            adapters=False,
            stages=False,
        ),
        "pipeline": Capabilities(
            whole_model=False,
            one_micro_batch=False,
            whole_gradient=True,
            activation_checkpoint=True,
            offload=False,
            shard=True,
            adapters=True,
            stages=True,
        ),
    }
)


def capabilities_of(executor: ExecutorName) -> Capabilities:
    """Capabilities of the executor of this name, one of the executors that `memory.executor` may say."""
    return CAPABILITIES[executor]
