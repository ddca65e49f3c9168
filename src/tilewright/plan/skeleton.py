"""A model with one layer of each kind in the place of all of them, on the meta device. Called by `plan.classes`."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tilewright.core.config import ModelSection, Recipe
from tilewright.core.errors import ConfigError
from tilewright.models.build import build_model, decoder_config
from tilewright.models.config import DecoderConfig
from tilewright.models.decoder import Decoder
from tilewright.models.hf import HFModel
from tilewright.models.shapes_only import shapes_only
from tilewright.ops.kernels import Kernels
from tilewright.plan.stacks import find_stack, keep_layers


@dataclass(frozen=True)
class Skeleton:
    """A meta model with one layer of each class in the place of all of them."""

    model: nn.Module
    layers: tuple[nn.Module, ...]
    indices: tuple[tuple[int, ...], ...]
    embedding_parameters: int
    head_parameters: int
    config: DecoderConfig | None
    """The whole decoder's; None for a foreign model."""


def skeleton_of(recipe: Recipe, vocab_size: int) -> Skeleton:
    """The skeleton of a recipe's model.

    Raises:
        ConfigError: a model without a list of layers.
        CheckpointError: its folder cannot be read.
    """
    if recipe.model.kind == "decoder":
        return _short_decoder(recipe.model, vocab_size)
    model = build_model(recipe.model.model_copy(update={"weights": "random"}), vocab_size, device="meta")
    assert isinstance(model, HFModel)
    return _foreign_skeleton(model)


def _short_decoder(section: ModelSection, vocab_size: int) -> Skeleton:
    """A decoder with one layer of each kind."""
    config = decoder_config(section, vocab_size)
    kinds = {config.is_moe(layer): layer for layer in reversed(range(config.num_layers))}
    indices = tuple(
        tuple(layer for layer in range(config.num_layers) if config.is_moe(layer) == moe) for moe in sorted(kinds)
    )
    short = replace(config, num_layers=len(kinds), num_dense_layers=int(False in kinds))
    with shapes_only():
        model = Decoder(short, Kernels.default())
    embedding = config.vocab_size * config.dim
    head = config.dim + (0 if config.tie_embeddings else embedding)
    return Skeleton(model, tuple(model.blocks), indices, embedding, head, config)


def _foreign_skeleton(model: HFModel) -> Skeleton:
    """Sort the layers of a foreign model by structure and keep one of each."""
    stack = find_stack(model)
    if stack is None:
        raise ConfigError(
            "The planner finds no layers in this model.",
            got=type(model.net).__name__,
            need="a list of layers (torch's ModuleList)",
            try_="tilewright plan without --device-memory, --host-memory and --on",
            where="model.path",
        )
    layers = model.get_submodule(stack.name)
    assert isinstance(layers, nn.ModuleList)
    inside = {id(p) for p in layers.parameters()}
    net: Any = model.net
    embedding = sum(p.numel() for p in net.get_input_embeddings().parameters())
    total = sum(p.numel() for p in model.net.parameters() if id(p) not in inside)
    first = tuple(layers[indices[0]] for indices in stack.kinds)
    keep_layers(model, stack, [indices[0] for indices in stack.kinds])
    return Skeleton(model, first, stack.kinds, embedding, total - embedding, None)
