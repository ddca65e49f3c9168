"""The running cost of each choice: seconds here, FLOPs, parameters, cache; and what is left of the run beside parts."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tilewright.compress.budget.held_out_rise import parameters
from tilewright.compress.search.library.layer_parts import PartPlace, config_of
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.compress.search.search_settings import MEASURES
from tilewright.compress.search.table.latency import Latency
from tilewright.models.decoder.config import DecoderConfig, LayerShape
from tilewright.models.decoder.flops import count_flops, layer_parameters

Costs = Mapping[str, float]
"""By measure, see `search_settings.MEASURES`."""
NOTHING = dict.fromkeys(MEASURES, 0.0)
CALL = "a layer's call"
"""Row of the latency table: what a layer takes beside what its parts add."""
_OF_FFN = ("ffn_dim", "expert_dim", "shared_dim")


def shape_key(config: DecoderConfig, place: PartPlace, shape: LayerShape) -> str:
    """The key under which the latency table has the costs of a part's shape: parts of one key are timed together.

    Example:
        >>> config = DecoderConfig.of(vocab_size=100, dim=64, num_heads=4, num_layers=2)
        >>> shape_key(config, PartPlace(0, "ffn"), config.shape)
        'ffn 192'
        >>> shape_key(config, PartPlace(0, "attention"), config.shape)
        'gqa attention, num_heads 4, num_kv_heads 4'
    """
    if place.part == "ffn":
        experts = config_of(config, place.layer, shape).is_moe(place.layer)
        return f"experts {shape.expert_dim}" if experts else f"ffn {shape.ffn_dim}"
    void = (
        (*_OF_FFN, "attention") if shape.attention == "mla" else (*_OF_FFN, "attention", "q_lora_rank", "kv_lora_rank")
    )
    values = {field.name: getattr(shape, field.name) for field in fields(shape) if field.name not in void}
    return ", ".join([f"{shape.attention} attention", *(f"{name} {value}" for name, value in values.items() if value)])


def costs_of(
    config: DecoderConfig, place: PartPlace, choice: PartChoice, table: Mapping[str, Any], context: int
) -> Costs:
    """The running costs of a choice at its place.

    Args:
        config: of the run.
        place: of the part.
        choice: one of its choices.
        table: rows of the latency table by `shape_key`.
        context: length of the rows that FLOPs are counted for.
    """
    if choice.shape is None:
        return NOTHING | (_seconds(table[CALL]) if place.part == "ffn" and CALL in table else {})
    row = table[shape_key(config, place, choice.shape)]
    one = config_of(config, place.layer, choice.shape)
    flops = count_flops(one, context)
    return _seconds(row) | {
        "flops": float(flops.layers[place.layer] + flops.attention[place.layer]),
        "parameters": float(layer_parameters(one, place.layer)),
        "cache": float(row["cache"]),
    }


def _seconds(row: Mapping[str, Any]) -> dict[str, float]:
    latency = Latency.from_json(row)
    return {"token": latency.token.least, "prefill": latency.prefill.least}


def measured_costs(model: Any, latency: Latency, cache: int, context: int) -> Costs:
    """The running costs of choices in a whole decoder: latency and cache as measured, the rest as counted."""
    return {
        "token": latency.token.least,
        "prefill": latency.prefill.least,
        "flops": float(count_flops(model.config, context).forward),
        "parameters": float(parameters(model)),
        "cache": float(cache),
    }


def rest_of(whole: Costs, own: Mapping[PartPlace, Costs]) -> Costs:
    """Running cost beside the choices, of embedding, last norm, head and calls between parts: the run less its parts,
    at least zero."""
    return {name: max(0.0, whole[name] - sum(costs[name] for costs in own.values())) for name in MEASURES}
