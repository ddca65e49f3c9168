"""config.json of Llama, Mistral and DeepSeek-V3 folders to and from `DecoderConfig`. No tensors, no transformers.

A shape that none of these holds, as layers of their own shape, is in a layout of tilewright's own, for its own commands
alone (`to_own_config`): what a recipe's `[model]` says.

Mistral's layout is Llama's model with heads of any width, and with a sliding window: it is written where there is one,
and where heads times their width are not the width of the model in a way that transformers' Llama takes.

What a folder asks for that the decoder cannot do exactly (rope scaling, biases, another activation) is an error, all
of it at once; nothing is ignored that would change a logit.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tilewright.core.errors import CheckpointError, Problem
from tilewright.formats.fp8_layout import layout_problems
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.folder.json_file import read_json

LLAMA, MISTRAL, DEEPSEEK, OWN = "llama", "mistral", "deepseek_v3", "tilewright"
_MISTRAL_WINDOW = 4096
"""What transformers takes where a folder of Mistral's layout says nothing; null is none. Its mask lets a position see
keys behind its own less the window, as ours does."""
_ARCHITECTURE = {LLAMA: "LlamaForCausalLM", MISTRAL: "MistralForCausalLM", DEEPSEEK: "DeepseekV3ForCausalLM"}
_FROM_ZERO = ("n_shared_experts", "first_k_dense_replace")
"""Sizes that may be 0."""
_FACTOR = "routed_scaling_factor"
"""What is needed and is no size."""
_SHARED_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
}
_DEEPSEEK_KEYS = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "moe_intermediate_size": "expert_dim",
    "first_k_dense_replace": "num_dense_layers",
    "n_group": "num_expert_groups",
    "topk_group": "num_limited_groups",
    _FACTOR: "routed_scaling",
}
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
    "norm_topk_prob": (True,),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
"""Keys that may only be absent or have these values: the decoder does nothing else."""


def read_config(folder: Path | str) -> DecoderConfig:
    """Read config.json: the decoder's shape from a folder of Llama, Mistral or DeepSeek-V3 layout.

    Raises:
        CheckpointError: not such a folder, keys missing, or something in it that the decoder cannot do.
        ConfigError: the values do not fit together.
    """
    raw = read_json(folder)
    where = str(Path(folder) / "config.json")
    layout = raw.get("model_type")
    if layout == OWN:
        return _read_own(raw, where)
    if not isinstance(layout, str) or layout not in _ARCHITECTURE:
        raise CheckpointError(
            "Model type is not supported by the decoder",
            got=f"model_type {layout!r}",
            need=" or ".join(repr(name) for name in _ARCHITECTURE),
            try_='model.kind = "hf", which trains any Hugging Face model',
            where=where,
        )
    keys = _SHARED_KEYS | (_DEEPSEEK_KEYS if layout == DEEPSEEK else {})
    problems = [*_missing(raw, keys, where), *(_mistyped(raw, where) or _unsupported(raw, where))]
    if problems:
        raise CheckpointError.from_problems(problems)
    values = {ours: raw[theirs] for theirs, ours in keys.items()}
    values |= {
        "rope_theta": _rope(raw).get("rope_theta", 10_000.0),
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_embeddings": raw.get("tie_word_embeddings") or False,
        "init_std": raw.get("initializer_range", 0.02),
        "num_kv_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
    }
    if layout == MISTRAL:
        values["sliding_window"] = raw.get("sliding_window", _MISTRAL_WINDOW) or 0
    if layout == DEEPSEEK:  # its head_dim is the rotary part
        values |= {"attention": "mla", "q_lora_rank": raw.get("q_lora_rank") or 0}
        values["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
        if values["num_dense_layers"] >= values["num_layers"]:
            values["num_experts"] = 0
    return DecoderConfig(**values)


def to_hf_config(config: DecoderConfig, dtype_name: str) -> dict[str, Any]:
    """config.json for this shape: Llama layout for dense GQA, Mistral's where there is a window or the width of the
    model is no multiple of its heads, DeepSeek-V3 layout for MLA.

    Raises:
        CheckpointError: no Hugging Face layout describes the shape; of an architecture of the caller's own, what it
            says.
    """
    if not isinstance(config.architecture, str):
        return config.architecture.folder_config(config, dtype_name)
    as_llama = not config.sliding_window and config.dim % config.num_heads == 0
    layout = DEEPSEEK if config.attention == "mla" else LLAMA if as_llama else MISTRAL
    problems = _unwritable(config)
    if problems:
        raise CheckpointError.from_problems(problems)
    # The keys that all three layouts share, then those of Mistral, Llama and DeepSeek.
    raw: dict[str, Any] = {
        "architectures": [_ARCHITECTURE[layout]],
        "model_type": layout,
        "dtype": dtype_name,
        **{theirs: getattr(config, ours) for theirs, ours in _SHARED_KEYS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.rope_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if layout == MISTRAL:
        return raw | {"sliding_window": config.sliding_window or None}
    raw |= {"attention_bias": False}
    if layout == LLAMA:
        return raw | {"mlp_bias": False}
    raw |= {theirs: getattr(config, ours) for theirs, ours in _DEEPSEEK_KEYS.items()}
    raw |= {
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank or None,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }
    if not config.num_experts:
        raw |= {"n_routed_experts": 1, "first_k_dense_replace": config.num_layers}
        raw |= {"moe_intermediate_size": config.ffn_dim, "num_experts_per_tok": 1}
    return raw


def to_own_config(config: DecoderConfig, dtype_name: str) -> dict[str, Any]:
    """config.json in tilewright's own layout: any shape that a recipe describes. transformers does not read it.

    Raises:
        ConfigError: no recipe describes the shape.
    """
    values = config.section_values()
    return {"model_type": OWN, "dtype": dtype_name, "vocab_size": config.vocab_size, "model": values}


def _read_own(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Read config.json of our own layout: settings of the shape alone: others of [model] name folders, and code."""
    values, size = raw.get("model"), raw.get("vocab_size")
    if not isinstance(values, dict) or type(size) is not int or size < 1:
        raise _bad_shape(f"vocab_size = {size!r}, model = {type(values).__name__}", where)
    if others := sorted(values.keys() - set(DecoderConfig.section_fields())):
        raise _bad_shape(f"{', '.join(others)} under `model`", where)
    try:
        return DecoderConfig.of(size, **values)
    except ValidationError as error:
        raise _bad_shape(" ".join(str(error).split())[:200], where) from error


def _bad_shape(got: str, where: str) -> CheckpointError:
    return CheckpointError(
        "Shape of the model cannot be read",
        got=got,
        need="vocab_size, and under `model` what a recipe's [model] says of a shape",
        try_="the folder as tilewright wrote it",
        where=where,
    )


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in config.json, where new (`rope_parameters`) and old folders (`rope_theta`, `rope_scaling`) keep
    them."""
    old = {key: raw[key] for key in ("rope_theta",) if key in raw}
    return old | (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})


def _missing(raw: Mapping[str, Any], keys: Mapping[str, str], where: str) -> list[Problem]:
    bad = [f"{key} = {raw.get(key)!r}" for key in keys if not _is_needed(key, raw.get(key))]
    if not bad:
        return []
    need = f"a whole number of at least 1 for each, or 0 of {', '.join(_FROM_ZERO)}"
    return [Problem("Sizes are missing from config.json", got=", ".join(bad), need=need, try_="add them", where=where)]


def _is_needed(key: str, value: Any) -> bool:
    return _is_real(value) if key == _FACTOR else _is_size(value, key not in _FROM_ZERO)


def _is_size(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e300


_FITS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("num_key_value_heads", "head_dim", "q_lora_rank"), (lambda x: x is None or _is_size(x, 0), "a whole number")
    ),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), (_is_real, "a number")),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters", "quantization_config"),
        (lambda x: x is None or isinstance(x, dict), "an object"),
    ),
    "tie_word_embeddings": (lambda x: x is None or isinstance(x, bool), "true or false"),
}
"""What keys that may be absent can be, and in words."""


def _mistyped(raw: Mapping[str, Any], where: str) -> list[Problem]:
    wrong = [
        (f"{key} = {raw[key]!r}", need) for key, (fits, need) in _FITS.items() if key in raw and not fits(raw[key])
    ]
    if not wrong and not (_is_real(theta := _rope(raw).get("rope_theta", 1.0)) and theta):
        wrong.append((f"rope_theta = {theta!r}", "a number above 0"))
    return [
        Problem("Value in config.json is not of its kind", got=got, need=need, try_="copy the file again", where=where)
        for got, need in wrong
    ]


def _unsupported(raw: Mapping[str, Any], where: str) -> list[Problem]:
    wrong = [f"{key} = {raw[key]!r}" for key, allowed in _ONLY_VALUES.items() if key in raw and raw[key] not in allowed]
    window = raw.get("sliding_window") if raw["model_type"] == MISTRAL else None
    if window is not None and (type(window) is not int or window < 1):
        wrong.append(f"sliding_window = {window!r}")
    rope = _rope(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        wrong.append(f"rope_type = {kind!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        wrong.append(f"partial_rotary_factor = {rope['partial_rotary_factor']}")
    wrong += layout_problems(raw["quantization_config"]) if raw.get("quantization_config") is not None else []
    return [
        Problem(
            "Features in config.json that the decoder does not support",
            got=text,
            need="the plain form, or another kind of model",
            try_='model.kind = "hf"',
            where=where,
        )
        for text in wrong
    ]


def _unwritable(config: DecoderConfig) -> list[Problem]:
    reasons = []
    if config.layers:
        reasons.append(("layers of their own shape", "layers that are alike (model.layers empty)"))
    if config.attention == "linear":
        reasons.append(("linear attention", "softmax attention"))
    if config.attention == "mla" and config.sliding_window:
        reasons.append(("latent attention with a window", "sliding_window = 0, or grouped-query attention"))
    if config.attention == "gqa" and config.num_experts:
        reasons.append(("grouped-query attention with experts", 'attention = "mla" with experts, or a dense model'))
    if config.num_experts and not config.num_shared_experts:
        reasons.append(("no shared expert", "at least one shared expert"))
    if config.num_experts and config.num_experts // config.num_expert_groups < 2:
        reasons.append(("one expert a group", "at least two experts a group"))
    return [
        Problem(
            "No Hugging Face layout for this shape",
            got=got,
            need=need,
            try_="keep tilewright's own checkpoint (checkpoint.export_hf = false)",
            where="checkpoint.export_hf",
        )
        for got, need in reasons
    ]
