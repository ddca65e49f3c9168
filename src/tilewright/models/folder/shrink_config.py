"""A model's config.json made small: few layers, of different kinds where there are, and narrow ones. For a trial that
computes what the model computes, in seconds.

Only sizes change, by the names that config.json files have for them; a config has the names of its architecture. What
does not come out as a model (a width that must be the product of others) its builder refuses: `smaller` gives less
changed ones to try next.
"""

from collections.abc import Iterator, Mapping
from typing import Any

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
WIDTH, HEAD = 64, 16
"""Of a layer's stream, and of a head."""
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads")
AT_MOST = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), WIDTH),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "ffn_hidden_size"), 2 * WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp"), 2 * WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), WIDTH // 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), WIDTH // 2),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), HEAD),
    "qk_head_dim": 2 * HEAD,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
}
_HALF_HEAD = ("short_factor", "long_factor")
"""Lists with a number for each rotated pair of a head's dims."""


def smaller(config: Mapping[str, Any], num_layers: int = 2) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield smaller configs of a model, each with the change in words: the smallest first, the last one with all layers
    whole.

    Args:
        config: of a model.
        num_layers: that are left of it, at least 2; a model of fewer keeps its own.

    Example:
        >>> [words for words, _ in smaller({"num_hidden_layers": 32, "hidden_size": 4096}, num_layers=4)]
        ['4 narrow layers', '4 layers', 'all layers']
    """
    whole = {name: value for name, value in config.items() if name != "quantization_config"}  # weights are drawn
    few = _shallow(whole, num_layers)
    layers = f"{num_layers} layers" if few != whole else "layers"
    yield layers.replace("layers", "narrow layers"), _narrow(few)
    if few != whole:
        yield layers, few
    yield "all layers", whole


def _shallow(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Shrink a config to `num_layers` layers in each of the parts that have a config of their own."""
    depth = next((config[name] for name in DEPTHS if isinstance(config.get(name), int)), 0)
    kept = _kept(config, depth, num_layers)
    changed: dict[str, Any] = {}
    for name, value in config.items():
        changed[name] = value
        if name in DEPTHS and isinstance(value, int):
            changed[name] = min(value, num_layers)
        elif _is_part(name, value):
            changed[name] = _shallow(value, num_layers)
        elif depth > num_layers and isinstance(value, list) and len(value) == depth:
            changed[name] = [value[i] for i in kept]
        elif name == "first_k_dense_replace" and isinstance(value, int):
            changed[name] = min(value, 1)  # the other layers have experts
    return changed


def _kept(config: Mapping[str, Any], depth: int, num_layers: int) -> list[int]:
    """Choose the layers that a shrunk model keeps: the first ones, with the first one of another kind among them."""
    kinds = config.get("layer_types")
    known = kinds if isinstance(kinds, list) and len(kinds) == depth else []
    other = next((i for i, kind in enumerate(known) if kind != known[0]), 1)
    return [*range(num_layers - 1), max(other, num_layers - 1)]


def _narrow(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = next((config[name] for name in HEADS if isinstance(config.get(name), int)), 0)
    few = 4 if heads >= 4 else max(1, min(heads, 2))
    changed: dict[str, Any] = {}
    for name, value in config.items():
        changed[name] = value
        if name in AT_MOST and isinstance(value, int):
            changed[name] = min(value, AT_MOST[name])
        elif name in HEADS and isinstance(value, int):
            changed[name] = few
        elif name in KV_HEADS and isinstance(value, int):
            changed[name] = few if value == heads else min(value, max(1, few // 2))
        elif _is_part(name, value) or name in ("rope_scaling", "rope_parameters"):
            changed[name] = _narrow(value) if isinstance(value, dict) else value
        elif name in _HALF_HEAD and isinstance(value, list):
            changed[name] = value[: HEAD // 2]
        elif name == "mrope_section" and isinstance(value, list) and len(value) == 3:
            changed[name] = [2, 3, 3]  # of the pairs of a head, for each of three directions
    return changed


def _is_part(name: str, value: object) -> bool:
    return name.endswith("_config") and isinstance(value, dict)
