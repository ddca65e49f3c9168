"""From a recipe, and a plan where there is one, to the layer-major executor: layer groups, where their bytes are
stored, what undoes a step.

What is done with each layer comes as a `MemoryPlan`: a plan's, or the one that `[memory]` gives for all layers alike
(`core.memory_plan.memory_plan_of`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tilewright.core.config.recipe import Recipe, Tier
from tilewright.core.errors import ConfigError
from tilewright.core.memory_plan import MemoryPlan, memory_plan_of
from tilewright.memory.layer_major.apply_plan import by_group, input_tiers
from tilewright.memory.layer_major.passes import LayerMajor
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.offload.activations import ActivationStore
from tilewright.memory.offload.lazy_params import dummy_values
from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.models.layerwise.hf_view import layered
from tilewright.models.layerwise.view import LayerGroups, LayerwiseModel, find_layer_groups
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.training.executor.layer_major import LayerMajorExecutor


@dataclass(frozen=True)
class LayerMajorParts:
    """A model in layer groups."""

    view: LayerwiseModel
    layer_groups: LayerGroups
    home: ParamOffloader

    @property
    def is_offloaded(self) -> bool:
        """Whether parameters or states are stored off the device."""
        return self.home.is_offloaded

    @property
    def away(self) -> set[nn.Module]:
        """Modules whose parameters are stored off the device."""
        parts = (part for part in self.layer_groups if self.home.homes(part)[0] != "device")
        return {module for part in parts for module in part.modules}


def slice_up(
    recipe: Recipe,
    model: Model,
    optimizer: DeepSeekAdam,
    device: torch.device,
    *,
    folder: Path,
    values: InitialValues | None,
    memory_plan: MemoryPlan | None = None,
) -> LayerMajorParts:
    """Cut a model and give its parameters and states their homes.

    Args:
        recipe: reads `[memory]`.
        memory plan: what is done with each layer; None: what the recipe says.
        model: converted; its parameters vacant where there are `values`.
        optimizer: over them.
        device: where the model computes.
        folder: of the disk tier.
        values: initial values.

    Raises:
        FitError: a tier has not so much room.
        ConfigError: the folder cannot be written, or the memory plan is of other layers.
    """
    memory = recipe.memory
    with dummy_values(model):  # a Hugging Face model has to be run before it can be cut
        view = layered(model)
    layer_groups = find_layer_groups(model, view, memory.layers_per_group)
    wanted = by_group(memory_plan or memory_plan_of(recipe, len(view.blocks)), layer_groups)
    home = ParamOffloader(
        model,
        layer_groups,
        optimizer,
        device,
        parameters={name: layer.parameters for name, layer in wanted.items()},
        states={name: layer.states for name, layer in wanted.items()},
        folder=folder,
        prefetch=memory.prefetch,
        values=values,
    )
    return LayerMajorParts(view, layer_groups, home)


def make_executor(
    recipe: Recipe,
    model: Model,
    sliced: LayerMajorParts,
    optimizer: DeepSeekAdam,
    *,
    clip: GradClip,
    memory_tracker: MemoryTracker,
    kernels: Kernels,
    weights: QuantizedWeights | None,
    folder: Path,
    memory_plan: MemoryPlan | None = None,
    group: dist.ProcessGroup | None = None,
) -> LayerMajorExecutor:
    """The executor of a sliced model.

    Args:
        memory plan: as for `slice_up`.
        group: ranks with copies of the model.

    Raises:
        ConfigError: the disk tier's folder cannot be written.
    """
    memory_plan = memory_plan or memory_plan_of(recipe, len(sliced.view.blocks))
    tiers = input_tiers(memory_plan, sliced.layer_groups)
    inputs = ActivationStore(
        tiers, memory_tracker.device, recipe.train.checkpoint_inputs, kernels=kernels, folder=folder
    )
    executor = LayerMajorExecutor(
        model,
        sliced.view,
        sliced.layer_groups,
        optimizer,
        clip=clip,
        delayed=recipe.optim.clip == "delayed",
        rollback_buffer=_rollback(recipe, memory_plan, memory_tracker.device, folder),
        device=memory_tracker.device,
        inputs=inputs,
        offloader=sliced.home,
        weights=weights,
        memory_tracker=memory_tracker,
        memory_plan=memory_plan,
        group=group,
    )
    _tell(memory_tracker, sliced, executor.run)
    return executor


def _tell(memory_tracker: MemoryTracker, sliced: LayerMajorParts, run: LayerMajor) -> None:
    """Let the memory tracker know whose bytes are where, while some are off the device; else it finds out by itself."""

    def parameters() -> Mapping[Tier, int]:
        return sliced.home.parameters.num_bytes if sliced.is_offloaded else {}

    def states() -> Mapping[Tier, int]:
        return sliced.home.states.num_bytes if sliced.is_offloaded else {}

    def activations() -> Mapping[Tier, int]:
        held = run.inputs.num_bytes
        if run.keeps:  # of graphs the memory tracker alone knows
            return {"disk": held["disk"]} if "disk" in held else {}
        return held if set(held) != {"device"} else {}

    for owner, num_bytes in (("parameters", parameters), ("optimizer", states), ("activations", activations)):
        memory_tracker.register_owner(owner, num_bytes)


def _rollback(recipe: Recipe, memory_plan: MemoryPlan, device: torch.device, folder: Path) -> RollbackBuffer | None:
    """What keeps the bytes that a delayed step changes: on disk, where some of them are stored there."""
    memory = recipe.memory
    if recipe.optim.clip != "delayed" or memory.rollback != "buffer":
        return None
    on_disk = any("disk" in (layer.parameters, layer.states) for layer in memory_plan)
    return RollbackBuffer("disk" if on_disk else "host", device, folder=folder)


def check_no_loss_scaling(scaled: bool) -> None:
    """Layer groups are updated before the whole gradient is seen, so an overflow could not be reported in time.

    Raises:
        ConfigError: some gradient passes through FP16.
    """
    if scaled:
        raise ConfigError(
            "Loss scaling is not supported by the layer-major executor",
            got="a precision with gradients in FP16",
            need="formats with the range of FP32",
            try_='precision.mode = "bf16_mixed" or "fp8_tile", or memory.executor = "standard"',
            where="memory.executor",
        )
