"""A decoder of chosen parts: its layers have shapes of their own, those with neither part are left out."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewright.compress.search.library.layer_parts import PartPlace, joined
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.compress.search.library.train_replacements import part_at
from tilewright.models.build import decoder_shapes, materialize
from tilewright.models.decoder.config import DecoderConfig

_LAYERS = "model.layers."


def config_with(config: DecoderConfig, chosen: Mapping[PartPlace, PartChoice]) -> DecoderConfig:
    """The shape of a decoder assembled with these choices.

    Args:
        config: of the run.
        chosen: at each place that the run has a part at.
    """
    kept = _kept(config, chosen)
    dense = sum(layer < config.num_dense_layers for layer in kept) if config.num_experts else config.num_dense_layers
    whole = replace(config, layers=(), num_layers=len(kept), num_dense_layers=dense)
    return whole.with_layers([shape for shape in kept.values() if shape is not None])


def _kept(config: DecoderConfig, chosen: Mapping[PartPlace, PartChoice]) -> dict[int, Any]:
    """Shapes of the layers that stay in an assembled decoder, by their numbers in the run."""
    found = {}
    for layer in range(config.num_layers):
        parts = [chosen.get(PartPlace(layer, part)) for part in ("attention", "ffn")]
        shape = joined(*(None if choice is None else choice.shape for choice in parts))
        if shape is not None:
            found[layer] = shape
    return found


@torch.no_grad()
def assembled(model: Any, chosen: Mapping[PartPlace, PartChoice], folder: Path) -> Any:
    """Assemble a decoder with these parts and the run's embedding, last norm and head; it shares no memory with the
    run's.

    Args:
        model: of the run.
        chosen: at each place.
        folder: of the library.
    """
    made = decoder_shapes(config_with(model.config, chosen), model.kernels)
    materialize(made, "cpu")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(_LAYERS)}
    for number, layer in enumerate(_kept(model.config, chosen)):
        for place, choice in chosen.items():
            part = part_at(model, place, choice, folder) if place.layer == layer else None
            if part is not None:
                state |= {f"{_LAYERS}{number}.{name}": tensor for name, tensor in part.state_dict().items()}
    made.load_state_dict(state)
    return made.eval()
