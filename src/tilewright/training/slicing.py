"""From a recipe's `[memory]` to the layer-major executor: slices, where their bytes are at home, what undoes a step.

Called by `assemble`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.core.config import Recipe
from tilewright.core.errors import ConfigError
from tilewright.memory.inputs import InputStore
from tilewright.memory.journal import Journal
from tilewright.memory.lazy import lent_values
from tilewright.memory.ledger import Ledger
from tilewright.memory.residence import Tiers
from tilewright.models.contract import FirstValues, Model
from tilewright.models.first_values import random_values, stored_values
from tilewright.models.layered import Layered, Slices, find_slices
from tilewright.models.layered_hf import layered
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.precision.weights import QuantizedWeights
from tilewright.training.layer_major_step import LayerMajorExecutor


@dataclass(frozen=True)
class Sliced:
    """A model in slices."""

    view: Layered
    slices: Slices
    home: Tiers

    @property
    def travels(self) -> bool:
        """Whether parameters or states are at home off the device."""
        return self.home.travels


def comes_in_slices(recipe: Recipe) -> bool:
    """Whether parameters get their first bytes slice by slice, each in its tier."""
    return recipe.memory.executor == "layer_major"


def first_values(recipe: Recipe, model: Model) -> FirstValues | None:
    """What fills the slices of a model on the meta device; None where the model has its values."""
    if not comes_in_slices(recipe):
        return None
    if recipe.model.weights == "load":
        return stored_values(model, recipe.model.path)
    return random_values(model, recipe.run.seed)


def slice_up(
    recipe: Recipe,
    model: Model,
    optimizer: DeepSeekAdam,
    device: torch.device,
    *,
    folder: Path,
    values: FirstValues | None,
) -> Sliced:
    """Cut a model and give its parameters and states their homes.

    Args:
        recipe: reads `[memory]`.
        model: converted; its parameters vacant where there are `values`.
        optimizer: over them.
        device: where the model computes.
        folder: of the disk tier.
        values: first values.

    Raises:
        FitError: a tier has not so much room.
        ConfigError: the folder cannot be written.
    """
    memory = recipe.memory
    with lent_values(model):  # a foreign model has to be run before it can be cut
        view = layered(model)
    slices = find_slices(model, view, memory.group)
    home = Tiers(
        model,
        slices,
        optimizer,
        device,
        parameters=memory.parameters,
        states=memory.states,
        folder=folder,
        prefetch=memory.prefetch,
        values=values,
    )
    return Sliced(view, slices, home)


def make_executor(
    recipe: Recipe,
    model: Model,
    sliced: Sliced,
    optimizer: DeepSeekAdam,
    *,
    clip: GradClip,
    ledger: Ledger,
    kernels: Kernels,
    weights: QuantizedWeights | None,
    folder: Path,
) -> LayerMajorExecutor:
    """The executor that `[memory]` describes.

    Raises:
        ConfigError: the disk tier's folder cannot be written.
    """
    memory = recipe.memory
    inputs = InputStore(memory.inputs, ledger.device, recipe.train.checkpoint_inputs, kernels=kernels, folder=folder)
    if sliced.travels:
        ledger.own("parameters", lambda: sliced.home.parameters.num_bytes)
        ledger.own("optimizer", lambda: sliced.home.states.num_bytes)
    if memory.inputs != "device":
        ledger.own("activations", lambda: inputs.num_bytes)
    return LayerMajorExecutor(
        model,
        sliced.view,
        sliced.slices,
        optimizer,
        clip=clip,
        lagged=recipe.optim.clip == "lagged",
        undo=_journal(recipe, ledger.device, folder),
        device=ledger.device,
        inputs=inputs,
        residence=sliced.home,
        weights=weights,
        ledger=ledger,
    )


def _journal(recipe: Recipe, device: torch.device, folder: Path) -> Journal | None:
    """What keeps the bytes that a lagged step changes: on disk, where some of them are at home there."""
    memory = recipe.memory
    if recipe.optim.clip != "lagged" or memory.undo != "journal":
        return None
    return Journal("disk" if "disk" in (memory.parameters, memory.states) else "host", device, folder=folder)


def refuse_loss_scaling(scaled: bool) -> None:
    """Slices are updated before the whole gradient is seen, so an overflow could not be told in time.

    Raises:
        ConfigError: some gradient passes through FP16.
    """
    if scaled:
        raise ConfigError(
            "The layer-major executor does not scale the loss.",
            got="a precision with gradients in FP16",
            need="formats with the range of FP32",
            try_='precision.mode = "bf16_mixed" or "fp8_tile", or memory.executor = "standard"',
            where="memory.executor",
        )
