"""The model that a recipe trains: the base as `models.build` makes it, and the adapters of `[lora]` on it."""

import torch

from tilewright.core.config.recipe import Recipe
from tilewright.models.base.protocols import Model
from tilewright.models.build import build_model, in_folder, init_weights, untrained_notes
from tilewright.models.hf.model import HFModel
from tilewright.ops.kernels import Kernels
from tilewright.precision.lora.lazy_load import can_fill, fill_adapted
from tilewright.precision.lora.lora import add_lora, load_fp8_weights, load_lora_decoder


def build_adapted(
    recipe: Recipe,
    vocab_size: int,
    kernels: Kernels,
    device: torch.device | str,
    *,
    fresh: bool = False,
    lazy: bool = False,
) -> Model:
    """The recipe's model with its adapters, if it has any.

    Args:
        recipe: reads `[model]`, `[lora]` and the seed.
        vocab_size: of the tokenizer; classes for image classification.
        kernels: implementations of the operations.
        device: where the model is made.
        fresh: give random weights their initial values, which freezing them needs to see. False where a checkpoint
            overwrites them.
        lazy: leave a Hugging Face model that gets adapters on the meta device where `fill_lazy` can fill it.

    Raises:
        ConfigError: the section's values do not fit together, or a target matches no layer.
        CheckpointError: the folder cannot be read.
    """
    model, lora = in_folder(recipe.model), recipe.lora
    adapters = (lora.rank, lora.alpha, lora.targets, lora.base)
    more = {"dropout": lora.dropout, "rslora": lora.rslora, "modules_to_save": lora.modules_to_save}
    coded = lora.base == "fp8" and model.weights == "load"
    if lora.rank and coded and model.kind == "decoder":  # never decoded: a byte per weight from the first moment on
        build_model(model, vocab_size, kernels, "meta")  # raises where folder and tokenizer do not fit
        return load_lora_decoder(model.path, *adapters, **more, kernels=kernels, device=device, seed=recipe.run.seed)
    if lazy and lora.rank and model.kind == "hf" and model.weights == "load":
        shapes = build_model(model, vocab_size, kernels, "meta")
        if can_fill(shapes, model.path):
            shapes.notes += untrained_notes(model)
            add_lora(shapes, *adapters, **more, kernels=kernels, seed=recipe.run.seed)
            return shapes
    built = build_model(model, vocab_size, kernels, device)
    if fresh and model.weights == "random":
        init_weights(built, recipe.run.seed)
    if lora.rank:
        add_lora(built, *adapters, **more, kernels=kernels, seed=recipe.run.seed)
        if coded:
            load_fp8_weights(built.net, model.path)
    return built


def fill_lazy(recipe: Recipe, model: Model, device: torch.device | str) -> None:
    """Fill a model that `build_adapted` left on the meta device, after its formats were chosen; any other stays.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if isinstance(model, HFModel) and next(model.parameters()).is_meta:
        fill_adapted(model, in_folder(recipe.model).path, device, recipe.run.seed)
