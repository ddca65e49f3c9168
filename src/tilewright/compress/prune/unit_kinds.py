"""The units of a model that can be cut, and the shape with fewer of them: of our own decoder and of
transformers' configs.

Nothing here knows the layers of an architecture. A kind of unit is a number in the shape; which tensors follow that
number is found by making the shape with one less (`tensors_of_units`).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tilewright.models.decoder.config import DecoderConfig

Kind = Literal["ffn", "heads", "experts", "expert_channels", "channels", "layers"]
"""ffn: channels of a feed-forward layer. heads: key/value heads, each with the query heads that read it (of MLA:
heads). experts: routed experts. expert_channels: hidden channels of experts. channels: of convolutions, in equal parts
of all stages. layers."""
KINDS: tuple[Kind, ...] = ("ffn", "heads", "experts", "expert_channels", "channels", "layers")
Fewer = Callable[[Sequence[int]], Any]
"""The shape with these units, by their numbers; of layers it matters which."""


@dataclass(frozen=True)
class Count:
    """The number of units of a kind that a layer (or for layers the model) has, and the shape with fewer."""

    units: int
    fewer: Fewer
    least: int = 1
    """Fewer than so many make no model."""


@dataclass(frozen=True)
class Whole:
    """Why units of a kind are not cut, in words that follow the kind."""

    reason: str


def counts(config: Any) -> dict[Kind, Count | Whole]:
    """The kinds of unit that a shape has, with their counts.

    Args:
        config: a `DecoderConfig` or a config of transformers.

    Example:
        >>> found = counts(DecoderConfig.of(vocab_size=100, dim=64, num_heads=4, num_kv_heads=2, num_layers=2))
        >>> {kind: count.units for kind, count in found.items()}
        {'ffn': 192, 'heads': 2, 'layers': 2}
        >>> found["heads"].fewer([1]).num_heads
        2
    """
    return _of_decoder(config) if isinstance(config, DecoderConfig) else _of_transformers(config)


def _of_decoder(config: DecoderConfig) -> dict[Kind, Count | Whole]:
    found: dict[Kind, Count | Whole] = {}
    dense = config.num_layers if not config.num_experts else min(config.num_dense_layers, config.num_layers)
    if config.layers:
        found = dict.fromkeys(("ffn", "heads"), Whole("layers have shapes of their own (model.layers)"))
        found["layers"] = Count(config.num_layers, lambda kept: _decoder_layers(config, kept))
        return found
    if dense:
        found["ffn"] = Count(config.ffn_dim, lambda kept: replace(config, ffn_dim=len(kept)))
    found["heads"] = _decoder_heads(config)
    if dense < config.num_layers:
        found["experts"] = _experts(
            config.num_experts,
            config.num_expert_groups,
            config.num_experts_per_token,
            lambda kept: replace(config, num_experts=len(kept)),
        )
        found["expert_channels"] = Count(config.expert_dim, lambda kept: replace(config, expert_dim=len(kept)))
    found["layers"] = Count(config.num_layers, lambda kept: _decoder_layers(config, kept))
    return found


def _decoder_heads(config: DecoderConfig) -> Count | Whole:
    if config.attention == "linear":
        return Whole("heads of linear attention are not cut")
    if config.attention == "mla":
        return Count(config.num_heads, lambda kept: replace(config, num_heads=len(kept), num_kv_heads=len(kept)))
    queries = config.num_heads // config.num_kv_heads
    return Count(
        config.num_kv_heads, lambda kept: replace(config, num_heads=queries * len(kept), num_kv_heads=len(kept))
    )


def _decoder_layers(config: DecoderConfig, kept: Sequence[int]) -> DecoderConfig:
    dense = sum(layer < config.num_dense_layers for layer in kept) if config.num_experts else config.num_dense_layers
    own = [config.layers[layer] for layer in kept] if config.layers else []
    return replace(config, num_layers=len(kept), num_dense_layers=dense, layers=()).with_layers(own)


def _experts(units: int, groups: int, chosen: int, fewer: Fewer) -> Count | Whole:
    if groups > 1:
        return Whole(f"its router chooses among {groups} groups of experts, which stay of equal size")
    return Count(units, fewer, least=max(2, chosen))


_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim")


def _of_transformers(config: Any) -> dict[Kind, Count | Whole]:
    found: dict[Kind, Count | Whole] = {}
    values = config.to_dict()
    width = next((name for name in _WIDTHS if name in values), None)
    if width is not None:
        size = values[width] or 4 * config.hidden_size  # as GPT-2 has it where nothing is said
        found["ffn"] = _width(config, width, size)
    if isinstance(values.get("moe_intermediate_size"), int):
        found["expert_channels"] = _width(config, "moe_intermediate_size", values["moe_intermediate_size"])
    experts = next((name for name in _EXPERTS if isinstance(values.get(name), int) and values[name] > 1), None)
    if experts is not None:
        groups, chosen = values.get("n_group") or 1, getattr(config, "num_experts_per_tok", 1)
        found["experts"] = _experts(values[experts], groups, chosen, lambda kept: changed(config, {experts: len(kept)}))
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        found["heads"] = _heads(config, values, heads)
    if isinstance(values.get("hidden_sizes"), list) and isinstance(values.get("embedding_size"), int):
        found["channels"] = _channels(config, values)
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int):
        found["layers"] = Count(layers, lambda kept: _layers(config, layers, kept))
    return found


def _width(config: Any, name: str, size: Any) -> Count | Whole:
    if not isinstance(size, int):
        return Whole(f"layers have widths of their own ({name})")
    return Count(size, lambda kept: changed(config, {name: len(kept)}))


def _heads(config: Any, values: dict[str, Any], heads: int) -> Count | Whole:
    groups = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(groups, int) or heads % groups:
        return Whole("layers have numbers of heads of their own")
    fixed: dict[str, Any] = {}
    if "qk_nope_head_dim" not in values and isinstance(getattr(config, "hidden_size", None), int):
        fixed["head_dim"] = values.get("head_dim") or config.hidden_size // heads  # many read it and do not list it

    def fewer(kept: Sequence[int]) -> Any:
        both = {"num_attention_heads": heads // groups * len(kept)}
        if hasattr(config, "num_key_value_heads"):
            both["num_key_value_heads"] = len(kept)
        return changed(config, fixed | both)

    return Count(groups, fewer)


_REDUCTION = 4
"""Of ResNet's bottlenecks: inner channels are this part of the outer ones."""


def _channels(config: Any, values: dict[str, Any]) -> Count | Whole:
    """Describe channels as a kind of unit: one unit is an equal part of each stage, as small as whole channels
    allow."""
    widths = {"embedding_size": values["embedding_size"], "hidden_sizes": list(values["hidden_sizes"])}
    inner = values["hidden_sizes"] if values.get("layer_type") == "bottleneck" else []
    if any(size % _REDUCTION for size in inner):
        return Whole(f"its widths are no multiples of {_REDUCTION}, which bottlenecks divide them by")
    parts = math.gcd(values["embedding_size"], *values["hidden_sizes"], *(size // _REDUCTION for size in inner))

    def fewer(kept: Sequence[int]) -> Any:
        sizes = [size // parts * len(kept) for size in widths["hidden_sizes"]]
        return changed(config, {"embedding_size": widths["embedding_size"] // parts * len(kept), "hidden_sizes": sizes})

    return Count(parts, fewer)


def _layers(config: Any, layers: int, kept: Sequence[int]) -> Any:
    values = config.to_dict()
    by_layer = {name: value for name, value in values.items() if _by_layer(name, value, layers)}
    lists: dict[str, Any] = {name: [value[i] for i in kept] for name, value in by_layer.items()}
    dense = values.get("first_k_dense_replace")
    if isinstance(dense, int):
        lists["first_k_dense_replace"] = sum(layer < dense for layer in kept)
    return changed(config, {"num_hidden_layers": len(kept)} | lists)


def _by_layer(name: str, value: Any, layers: int) -> bool:
    """True if a setting is a list with an entry per layer, which a cut shortens. A list of tokens that end a text is
    not, even if it is as long."""
    return isinstance(value, list) and len(value) == layers and not name.endswith("_token_id")


def changed(config: Any, values: dict[str, Any]) -> Any:
    """A config of transformers with other values, to have fewer units of a kind.

    Where Llama's layout refuses a number of heads that does not divide the width, Mistral's is the same model: it has
    `head_dim`, and no biases either.

    Raises:
        ValueError, StrictDataclassError: no config of transformers holds them.
    """
    from huggingface_hub.errors import StrictDataclassError

    names = getattr(config, "attribute_map", {})
    merged = copy.deepcopy(config.to_dict()) | {names.get(name, name): value for name, value in values.items()}
    try:
        return type(config).from_dict(merged)
    except (ValueError, StrictDataclassError):
        if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
            raise
    from transformers.models.mistral.configuration_mistral import MistralConfig

    drop = ("model_type", "architectures", "attention_bias", "mlp_bias", "pretraining_tp")
    kept = {name: value for name, value in merged.items() if name not in drop}
    return MistralConfig.from_dict(kept | {"architectures": ["MistralForCausalLM"], "sliding_window": None})
