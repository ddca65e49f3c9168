"""The plan of a run for each layer: where its bytes are stored, and what it keeps for the backward pass.

A plan decides it, the executors do it. `MemoryPlan.uniform` is what the settings of a recipe say without a plan: the
same for all layers. Nothing here knows tensors; `plan` makes memory plans, `training` and `memory` read them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tilewright.core.config.recipe import TIERS, Offload, Recipe, Tier
from tilewright.core.errors import ConfigError

Activations = Literal["keep", "selective", "matmuls", "attention", "recompute"]
"""keep: everything that backward needs; selective: the outputs of matmuls and attention; matmuls, attention: the
outputs of one of them; recompute: a layer's input, which waits in the layer's `inputs` tier."""
KIND_OF: dict[str, Activations] = {
    "none": "keep",
    "selective": "selective",
    "matmuls": "matmuls",
    "attention": "attention",
    "full": "recompute",
}
"""By the values of `train.activation_checkpoint`, from the most that is kept to the least."""
STEP_PHASES = ("forward", "loss", "backward", "update")
"""Prefix of the names of phases of a training step; loading, evaluation and checkpoints have others."""
OFFLOADS: dict[object, Offload] = {tier: offload for offload, tier in TIERS.items()}
"""Values of `memory.offload_params` and its kind, by tier."""


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """One layer, or what is before or after the layers.

    Raises:
        ValueError: a word or number that means nothing.
    """

    parameters: Tier = "device"
    states: Tier = "device"
    """Home of the optimizer's states."""
    inputs: Tier = "device"
    """Where the input of a layer that is recomputed waits for the backward pass."""
    activations: Activations = "keep"
    mlp_chunks: int = 1
    """Parts into which the tokens of the layer's MLP are cut."""
    attention_block: int = 0
    """Query rows at a time in attention. 0: all at once."""

    def __post_init__(self) -> None:
        for tier in (self.parameters, self.states, self.inputs):
            if tier not in get_args(Tier):
                raise ValueError(f"a tier is one of {', '.join(get_args(Tier))}, not {tier!r}")
        if self.activations not in get_args(Activations):
            raise ValueError(f"activations are one of {', '.join(get_args(Activations))}, not {self.activations!r}")
        if self.mlp_chunks < 1 or self.attention_block < 0:
            raise ValueError(f"need mlp_chunks >= 1 and attention_block >= 0, got {self}")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All layers of a model in order, and the two ends.

    Example:
        >>> memory_plan = MemoryPlan.uniform(3, states="disk", activations="recompute")
        >>> memory_plan.layers[2].states, memory_plan.head.states, memory_plan.head.activations
        ('disk', 'disk', 'keep')
    """

    layers: tuple[LayerMemory, ...]
    embedding: LayerMemory = LayerMemory()
    """Parameters read before the first layer. Its `parameters` and `states` mean something, the rest does not."""
    head: LayerMemory = LayerMemory()
    """Parameters read after the last layer; as `embedding`, and `inputs` is where its input waits."""

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        *,
        parameters: Tier = "device",
        states: Tier = "device",
        inputs: Tier = "device",
        activations: Activations = "keep",
        mlp_chunks: int = 1,
        attention_block: int = 0,
    ) -> "MemoryPlan":
        """A memory plan that treats all layers alike; both ends are stored where the layers are."""
        layer = LayerMemory(
            parameters=parameters,
            states=states,
            inputs=inputs,
            activations=activations,
            mlp_chunks=mlp_chunks,
            attention_block=attention_block,
        )
        end = LayerMemory(parameters=parameters, states=states, inputs=inputs)
        return cls(layers=(layer,) * num_layers, embedding=end, head=end)

    def __iter__(self) -> Iterator[LayerMemory]:
        yield from (self.embedding, *self.layers, self.head)


def plan_text(path: Path) -> str:
    """The text of a plan file; what it means is read in `planner.plan_file`.

    Raises:
        ConfigError: no such file, or one that cannot be read as UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable_plan(path, str(error.strerror)) from error
    except UnicodeDecodeError as error:
        raise unreadable_plan(path, str(error)) from error


def unreadable_plan(path: Path, why: str) -> ConfigError:
    """The error of a plan file that is not there, or is none."""
    return ConfigError(
        "Plan file cannot be read",
        got=why,
        need="a file that `tilewright plan --out` wrote",
        try_="tilewright plan RECIPE --out FILE, which makes one",
        where=str(path),
    )


def memory_plan_of(recipe: Recipe, num_layers: int) -> MemoryPlan:
    """Make the memory plan of a recipe's settings alone: the same for all layers."""
    memory = recipe.memory
    parameters, states, inputs = memory.tiers if memory.can.offload else ("device",) * 3
    kept = KIND_OF[recipe.train.activation_checkpoint] if memory.can.activation_checkpoint else "recompute"
    return MemoryPlan.uniform(
        num_layers,
        parameters=parameters,
        states=states,
        inputs=inputs,
        activations=kept,
        mlp_chunks=memory.mlp_chunks,
        attention_block=memory.attention_block,
    )
