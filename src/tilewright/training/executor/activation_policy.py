"""The plan of each layer of a model, as a `MemoryPlan` says; and from one to the next between two steps.

    checkpoint_layers(model, memory_plan)  # before it is compiled
    cut_layers(model, memory_plan, compile=...)  # after `precision.convert`
    policy = ActivationPolicy(model, memory_plan)
    policy.apply(another)

For the standard executor, which keeps all bytes on the device; `memory.layer_major.apply_plan` is this for the
layer-major one, which shares `cut_layers`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tilewright.core.errors import ConfigError
from tilewright.core.memory_plan import KIND_OF, Activations, MemoryPlan
from tilewright.memory.chunked_mlp import chunk_layers, chunk_mlps
from tilewright.memory.layer_major.apply_plan import check_same_numbers, other_layers
from tilewright.models.base.protocols import Model

_MODES: dict[Activations, Any] = {kind: mode for mode, kind in KIND_OF.items()}
Item = TypeVar("Item")


def checkpoint_layers(model: Model, memory_plan: MemoryPlan) -> None:
    """Let each layer keep for backward the activations that the memory plan says.

    Raises:
        ConfigError: the memory plan is of other layers, or asks for what the model or the standard executor cannot do.
    """
    _check_offload(memory_plan)
    modes = _for_layers(model, [_MODES[layer.activations] for layer in memory_plan.layers], "activations")
    model.checkpointing = modes


def cut_layers(model: Model, memory_plan: MemoryPlan, *, compile: bool) -> None:
    """Cut the MLP and attention of each layer into the slices that the memory plan says. Call it once.

    Args:
        model: converted.
        memory_plan: of its layers.
        compile: layers are compiled.

    Raises:
        ConfigError: the memory plan is of other layers, or asks for what the model cannot do.
    """
    tiles = _for_layers(model, [layer.mlp_chunks for layer in memory_plan.layers], "mlp_chunks")
    if len(set(tiles)) == 1:
        if tiles[0] > 1:  # wherever they are: also in a model whose layers were not found
            chunk_mlps(model, tiles[0], model.notes.append, compile=compile)
    else:
        chunk_layers(model.layers, tiles, model.notes.append, compile=compile)
    blocks = _for_layers(model, [layer.attention_block for layer in memory_plan.layers], "attention_block")
    if set(blocks) != {model.kernels.attention_block}:
        model.attention_blocks = blocks


def _for_layers(model: Model, wanted: Sequence[Item], name: str) -> tuple[Item, ...]:
    """The activation policy's wish for each layer; of a model whose layers were not found, the one wish for all.

    Raises:
        ConfigError: that is not the same for all, or there are more or fewer layers.
    """
    if model.layers:
        if len(wanted) != len(model.layers):
            raise other_layers(len(wanted), len(model.layers))
        return tuple(wanted)
    if len(set(wanted)) != 1:
        raise ConfigError(
            "Per-layer memory plans are not supported by this model",
            got=f"{name} that differ by layer, for {type(model).__name__}, in which no list of layers was found",
            need="the same for all layers",
            try_='memory.plan = "" and the settings of [train] and [memory]',
            where="memory.plan",
        )
    return (wanted[0],)


def _check_offload(memory_plan: MemoryPlan) -> None:
    away = {tier for layer in memory_plan for tier in (layer.parameters, layer.states, layer.inputs)} - {"device"}
    if away:
        raise ConfigError(
            "Offloading needs the layer-major executor",
            got=f"parameters, states or inputs on {' and '.join(sorted(away))}",
            need='all on the device (offload settings "none")',
            try_='memory.executor = "layer_major", or a plan made for the standard executor',
            where="memory.executor",
        )


class ActivationPolicy:
    """Reads and changes what the layers of a model keep.

    Args:
        model: treated as `memory_plan` says.
        memory_plan: the first one.

    Raises:
        ConfigError: see `checkpoint_layers`.
    """

    def __init__(self, model: Model, memory_plan: MemoryPlan) -> None:
        self._model, self._asked = model, memory_plan
        checkpoint_layers(model, memory_plan)

    @property
    def now(self) -> MemoryPlan:
        """The activation policy's present plan of each layer."""
        modes = self._model.checkpointing
        modes = modes if self._model.layers else modes * len(self._asked.layers)
        rows = zip(self._asked.layers, modes, strict=True)
        layers = tuple(replace(layer, activations=KIND_OF[mode]) for layer, mode in rows)
        return replace(self._asked, layers=layers)

    def apply(self, memory_plan: MemoryPlan) -> None:
        """Keep the activations of a memory plan from the next step on. Call it between steps only.

        Raises:
            ConfigError: it cannot be done by this executor, or not while the run continues; nothing has changed then.
        """
        if len(memory_plan.layers) != len(self._asked.layers):
            raise other_layers(len(memory_plan.layers), len(self._asked.layers))
        check_same_numbers(memory_plan, self.now, exact=self._model.checkpoint_inputs == "exact")
        checkpoint_layers(self._model, memory_plan)
        self._asked = memory_plan
