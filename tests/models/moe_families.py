"""Every mixture of experts in the installed transformers, tiny, with random weights: for what must hold for all.

A family's config is its default with the sizes made small by name; a few families need a key or two more. Widths, ranks
and numbers of experts all differ, so that nothing matches by accident. Nothing is downloaded.
"""

import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

EXPERTS, CHOSEN, WIDTH, VOCABULARY = 6, 2, 48, 97

SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?", VOCABULARY),
    (r"(moe_)?num_experts|num_(local|routed)_experts|n_routed_experts|moe_num_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_(top_?)?k|top_k_experts", CHOSEN),
    (r"n_group|topk_group|num_expert_group", 2),
    (r"(moe|expert|routed_expert|shared_expert).*(intermediate_size|ffn_hidden_size|_dim)", 40),
    (r".*intermediate_size|(.*_)?ffn_hidden_size|.*_ffn_dim|d_ff", 56),
    (r"hidden_size|d_model", WIDTH),
    (r".*num_hidden_layers|n_layers|(en|de)coder_layers|num_(decoder_)?layers", 2),
    (r"(.*_)?num_attention_heads|(.*_)?n_heads|num_heads|.*coder_attention_heads|index_n_heads|.*num_value_heads", 4),
    (r"(.*_)?num_key_value_heads|kv_n_heads|linear_num_heads|.*num_key_heads", 4),
    (r"(pad|bos|eos)_token_id", 0),
    (r"(.*_)?head_dim|kv_channels|d_kv", 16),
    (r"q_lora_rank|o_lora_rank", 24),
    (r"kv_lora_rank", 20),
    (r"max_position_embeddings|max_seq_len", 64),
    (r"first_k_dense_replace|num_dense_layers", 0),
)
"""Names of settings, and what they become."""

EXTRA: Mapping[str, Mapping[str, Any]] = {
    "axk2": {"index_topk": 8},
    "bailing_hybrid": {"model_max_length": 64},
    "dbrx": {"attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"num_experts_per_tok": CHOSEN, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": {"num_experts_per_tok": CHOSEN},
    "deepseek_v32": {"index_topk": 8},
    "diffusion_gemma": {"num_experts": EXPERTS, "top_k_experts": CHOSEN, "moe_intermediate_size": 40},
    "doge": {"is_moe": True, "num_experts": 25},
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [40, 24],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": CHOSEN, "moe_intermediate_size": 40},
    "glm4v_moe": {
        "head_dim": 16,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [2, 2, 4]},
        },
    },
    "glm5_next": {"qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 8, "index_kpool": 2},
    "glm_moe_dsa": {"index_topk": 8},
    "granitemoehybrid": {
        "mamba_d_head": 24,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 32},
    "mimo_v2_flash": {"num_key_value_heads": 2, "head_dim": 24},
    "mistral4": {"head_dim": 32, "qk_head_dim": 32},
    "nllb_moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "qwen4_exp": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "ngram_vocab_size_base": 31, "make_ngram_vocab_size_divisible_by": 2},
    },
    "step3p7": {"sliding_window": 8},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs too, by its folder."""

TEXT = {"qwen3_omni_moe": "qwen3_omni_moe_text"}
"""The config for text, where it is not the only one of its name."""

LAYERS = 4
"""Most layers of a model, so that each kind of layer is there."""


def families() -> list[str]:
    """Folders of transformers whose models have experts, by what their source defines."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    sources = sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py"))
    mixtures = re.compile(r"\"router_logits\": |use_experts_implementation")
    return sorted({source.parent.name for source in sources if mixtures.search(source.read_text())})


def build(family: str, **changes: Any) -> nn.Module:
    """A tiny model of a family, in eval mode. Raises what transformers raises where it cannot be built."""
    from transformers.models.auto import modeling_auto

    config = config_of(family, **changes)
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_MAPPING,
    )
    model_class: Any = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if model_class is None:  # the text part of a model for several kinds of input
        source = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        model_class = next(
            value
            for value in vars(source).values()
            if isinstance(value, type)
            and issubclass(value, nn.Module)
            and value.__dict__.get("config_class") is type(config)
            and "forward" in vars(value)
        )
    torch.manual_seed(0)
    return model_class(config).eval()


def run(model: Any) -> Any:
    """A forward pass on two rows of text, long enough that no number of positions is one of experts."""
    ids = (torch.arange(80) % VOCABULARY).view(2, 40)
    both = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, use_cache=False, **both)


def config_of(family: str, **changes: Any) -> Any:
    """The family's config for text, made small."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    types = [name for name in CONFIG_MAPPING if model_type_to_module_name(name) == family]
    text = [name for name in types if name.endswith("_text")]
    config_class = CONFIG_MAPPING[TEXT.get(family) or (text or types)[0]]
    return config_class(**{**small(config_class()), **EXTRA.get(family, {}), **changes})


def small(config: Any) -> dict[str, Any]:
    """The settings of a config that are sizes, made small; lists with an entry for each layer made short."""
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if type(value) is int:
            settings.update((name, size) for pattern, size in SIZES if re.fullmatch(pattern, name))
        elif hasattr(value, "to_dict"):
            settings[name] = type(value)(**small(value))
    layered = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == getattr(config, "num_hidden_layers", 0)
    }
    if layered:
        kinds = list(dict.fromkeys(zip(*layered.values(), strict=True)))[:LAYERS]
        settings |= {name: list(entries) for name, entries in zip(layered, zip(*kinds, strict=True), strict=True)}
        settings["num_hidden_layers"] = len(kinds)
    return settings
