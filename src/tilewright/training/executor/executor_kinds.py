"""The executors by name: what each can do, and what makes one of a recipe, and of a plan where there is one.

The layer-major one is made of layer groups, the tiers in which their bytes are stored, and what undoes a step. What is
done with each layer comes as a `MemoryPlan`: a plan's, or the one that the recipe gives for all layers alike.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tilewright.core.config.conflicts import executor_conflicts
from tilewright.core.config.executors import Capabilities, ExecutorName, capabilities_of
from tilewright.core.config.recipe import Recipe, Tier
from tilewright.core.config.sections.precision import PrecisionSection
from tilewright.core.errors import ConfigError, Problem
from tilewright.core.memory_plan import MemoryPlan
from tilewright.memory.layer_major.apply_plan import by_group, input_tiers
from tilewright.memory.layer_major.passes import LayerMajor
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.offload.activations import ActivationStore
from tilewright.memory.offload.lazy_params import dummy_values
from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.models.build import layered
from tilewright.models.layerwise.layer_view import LayerGroups, find_layer_groups
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.training.executor.base import Executor, ExecutorInputs, ExecutorKind
from tilewright.training.executor.layer_major import LayerMajorExecutor
from tilewright.training.executor.standard import standard_executor


def layer_major_executor(inputs: ExecutorInputs) -> LayerMajorExecutor:
    """Make the layer-major executor of a run: cut the model into layer groups, and place parameters and states in their
    memory tiers.

    Raises:
        FitError: a tier has not so much room.
        ConfigError: the folder of the disk tier cannot be written, the memory plan is of other layers, or some gradient
            passes through FP16.
    """
    recipe, model, device = inputs.recipe, inputs.model, inputs.memory_tracker.device
    if inputs.scaler is not None:
        raise _no_loss_scaling(recipe.precision)
    with dummy_values(model):  # a Hugging Face model has to be run before it can be cut
        view = layered(model)
    layer_groups = find_layer_groups(model, view, recipe.memory.layers_per_group)
    memory_plan = inputs.plan_of(len(view.blocks))
    home = _home(inputs, layer_groups, memory_plan)
    away = {module for part in layer_groups if home.homes(part)[0] != "device" for module in part.modules}
    executor = LayerMajorExecutor(
        model,
        view,
        layer_groups,
        inputs.optimizer,
        clip=inputs.clip,
        delayed=recipe.optim.clip == "delayed",
        rollback_buffer=_rollback(recipe, memory_plan, device, inputs.folder),
        device=device,
        inputs=ActivationStore(
            input_tiers(memory_plan, layer_groups),
            device,
            recipe.train.checkpoint_inputs,
            kernels=inputs.kernels,
            folder=inputs.folder,
        ),
        offloader=home,
        weights=QuantizedWeights(model, inputs.optimizer, without=away),
        memory_tracker=inputs.memory_tracker,
        memory_plan=memory_plan,
        data=inputs.world.data.handle,
        everyone=inputs.world.everyone.handle,
        communicator=None if inputs.sync is None else inputs.sync.replicas,
    )
    _tell(inputs.memory_tracker, executor.run)
    return executor


def _home(inputs: ExecutorInputs, layer_groups: LayerGroups, memory_plan: MemoryPlan) -> ParamOffloader:
    """Place the parameters and states of each layer group in their memory tiers, for the layer-major executor."""
    wanted = by_group(memory_plan, layer_groups)
    return ParamOffloader(
        inputs.model,
        layer_groups,
        inputs.optimizer,
        inputs.memory_tracker.device,
        parameters={name: layer.parameters for name, layer in wanted.items()},
        states={name: layer.states for name, layer in wanted.items()},
        folder=inputs.folder,
        prefetch=inputs.recipe.memory.prefetch,
        values=inputs.values,
    )


def _tell(memory_tracker: MemoryTracker, run: LayerMajor) -> None:
    """Tell the memory tracker, for a kind of executor, whose bytes are where, while some are off the device; else it
    finds out by itself."""
    home = run.offloader

    def parameters() -> Mapping[Tier, int]:
        return home.parameters.num_bytes if home.is_offloaded else {}

    def states() -> Mapping[Tier, int]:
        return home.states.num_bytes if home.is_offloaded else {}

    def activations() -> Mapping[Tier, int]:
        held = run.inputs.num_bytes
        if run.keeps:  # of graphs the memory tracker alone knows
            return {"disk": held["disk"]} if "disk" in held else {}
        return held if set(held) != {"device"} else {}

    for owner, num_bytes in (("parameters", parameters), ("optimizer", states), ("activations", activations)):
        memory_tracker.register_owner(owner, num_bytes)


def _rollback(recipe: Recipe, memory_plan: MemoryPlan, device: torch.device, folder: Path) -> RollbackBuffer | None:
    """The rollback buffer of a kind of executor, for the bytes that a delayed step changes: on disk, where some of them
    are stored there."""
    memory = recipe.memory
    if recipe.optim.clip != "delayed" or memory.rollback != "buffer":
        return None
    on_disk = any("disk" in (layer.parameters, layer.states) for layer in memory_plan)
    return RollbackBuffer("disk" if on_disk else "host", device, folder=folder)


def _no_loss_scaling(precision: PrecisionSection) -> ConfigError:
    """Make the error of loss scaling with the layer-major executor. Layer groups are updated before the whole gradient
    is seen, so an overflow could not be reported in time."""
    got, change = [], []
    if precision.loss_scale != "auto":
        got, change = [f"precision.loss_scale = {precision.loss_scale}"], ['precision.loss_scale = "auto"']
    if precision.names_fp16:
        got.append("a precision with gradients in FP16")
        change.append('precision.mode = "bf16_mixed" or "fp8_tile", without a start_mode or rules of FP16')
    return ConfigError(
        "Loss scaling is not supported by the layer-major executor",
        got=" and ".join(got),
        need="formats with the range of FP32, and no loss scale",
        try_=f'{" and ".join(change)}; or memory.executor = "standard"',
        where="memory.executor",
    )


def _pipeline_executor(inputs: ExecutorInputs) -> Executor:
    from tilewright.training.executor.pipeline import pipeline_executor  # torch's pipelining: half a second

    return pipeline_executor(inputs)


_MAKE: Mapping[ExecutorName, Callable[..., Any]] = MappingProxyType(
    {"standard": standard_executor, "layer_major": layer_major_executor, "pipeline": _pipeline_executor}
)
KINDS: Mapping[str, ExecutorKind] = MappingProxyType(
    {name: ExecutorKind(capabilities_of(name), make) for name, make in _MAKE.items()}
)
"""By `Recipe.executor`."""


def executor_of(recipe: Recipe, given: ExecutorKind | None = None) -> ExecutorKind:
    """Choose the executor of a recipe's steps: the one that the caller gives, else the one that the recipe names."""
    return given or KINDS[recipe.executor]


def check_executor(recipe: Recipe, can: Capabilities) -> None:
    """Refuse a kind of executor that a caller gives and that cannot do what a recipe asks.

    Raises:
        ConfigError: it cannot.
    """
    found = executor_conflicts(recipe, can, "an executor that the caller gave")
    problems = [Problem(c.what, c.got, c.need, c.try_, ", ".join(c.fields)) for c in found]
    if problems:
        raise ConfigError.from_problems(problems)
