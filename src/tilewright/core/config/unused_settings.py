"""Settings that the rest of the recipe makes void. A user who wrote one must hear about it; the loader says it."""

import os
from collections.abc import Callable
from functools import partial
from typing import get_args

from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.data import StreamingSection
from tilewright.core.config.sections.parallel import INTERLEAVED
from tilewright.core.config.sections.precision import ScaledFormat

_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = (
    "num_experts_per_token",
    "num_shared_experts",
    "expert_dim",
    "num_dense_layers",
    "num_expert_groups",
    "num_limited_groups",
    "routed_scaling",
    "balance_rate",
)
_SHAPE = (
    *("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "layers", "rope_theta"),
    *("sliding_window", "norm_eps", "tie_embeddings", "attention", "num_experts"),
    *(_MLA + _EXPERTS),
)
_TEXT_DATA = ("domains", "max_bytes", "seq_len", "vocab_size", "tokenizer", "text_field")
_CONTROL = (
    *("granularity", "budget", "interval", "cooldown", "patience"),
    *("recalibrate_interval", "retry_steps", "spike_factor"),
)
_OF_POLICY = {
    "temperature": ("temperature",),
    "schedule": ("schedule",),
    "ppl_guard": ("boost", "patience", "noise", "cooldown", "max_ratio", "calm"),
    "exp3": ("keep",),
    "aioli": ("probe", "hold", "rate"),
}
_MIXING = ("interval", "eval_batches", "lowest", "highest", "smoothing", "max_epochs", *sum(_OF_POLICY.values(), ()))
_UNBLOCKED = ("ref", "varlen", "efficient")
"""Attention that holds all scores, or goes by blocks of its own."""
_SCHEDULE = ("fp8_from", "fp8_until", "fp8_after")
_DISTILL = (
    "temperature",
    "weight",
    "divergence",
    "cache",
    "cache_top_k",
    "hidden",
    "attention",
    "hidden_weight",
    "attention_weight",
    "hidden_projection",
)
_LOSS_SCALE = ("loss_scale_window", "loss_scale_min", "loss_scale_max")
_LOW_PRECISION = (
    *("mode", "start_mode", "rules", "fp32_ops", "loss_scale", "eval_fp32", "fp8_scale"),
    *_LOSS_SCALE,
    *("fp8_min_gain", "bf16_grad_layers", *_SCHEDULE, "lr_noise_damping"),
)


_OFFLOAD = (
    *("layers_per_group", "offload_params", "offload_optimizer", "offload_activations"),
    *("offload_dir", "prefetch", "rollback"),
)


def _tiers(recipe: Recipe) -> set[str]:
    return set(recipe.memory.tiers)


def _scaled_modes(recipe: Recipe) -> bool:
    return bool({recipe.precision.mode, recipe.precision.start_mode} & set(get_args(ScaledFormat)))


def _fp8_modes(recipe: Recipe) -> bool:
    return any(
        mode is not None and mode.startswith("fp8") for mode in (recipe.precision.mode, recipe.precision.start_mode)
    )


def _fp8_rules(recipe: Recipe) -> bool:
    formats = (
        getattr(rule, name) for rule in recipe.precision.rules for name in ("compute", "fprop", "dgrad", "wgrad")
    )
    return any(name.startswith("fp8") for name in formats)


def _other_policy(policy: str, recipe: Recipe) -> bool:
    return recipe.data.mixing.policy != policy


def _is_far(recipe: Recipe) -> bool:
    """True if the recipe reads data from remote addresses, so that settings of remote data are used."""
    sources = recipe.data.sources.values() or (recipe.data.source,)
    return any("://" in source and not source.startswith("hf://") for source in sources)


def _is_built(source: str) -> bool:
    """True if a source is the folder of a built dataset; False for what is no path at all."""
    return os.path.isfile(os.path.join(os.path.expanduser(source), "dataset.json"))


# (is it so here?, said how, section, its fields that then do nothing). What is in no row always has an effect.
_VOID: tuple[tuple[Callable[[Recipe], bool], str, str, tuple[str, ...]], ...] = (
    (lambda r: bool(r.model.path), "model.path gives the shape", "model", _SHAPE),
    (lambda r: r.model.attention == "mla", 'model.attention = "mla"', "model", ("num_kv_heads", "head_dim")),
    (lambda r: r.model.attention == "gqa", 'model.attention = "gqa"', "model", _MLA),
    (
        lambda r: r.model.attention == "linear",
        'model.attention = "linear"',
        "model",
        ("num_kv_heads", "sliding_window", *_MLA),
    ),
    (lambda r: r.model.num_experts == 0, "model.num_experts = 0", "model", _EXPERTS),
    (lambda r: r.model.weights == "load", 'model.weights = "load"', "model", ("init_std",)),
    (lambda r: bool(r.data.tokenizer), "data.tokenizer is given", "data", ("vocab_size",)),
    (lambda r: r.model.weights == "load", 'model.weights = "load"', "data", ("vocab_size",)),
    (
        lambda r: r.data.source == "installed" and not r.data.sources,
        'data.source = "installed"',
        "data",
        ("text_field",),
    ),
    (
        lambda r: not r.data.sources and _is_built(r.data.source),
        "data.source is a built dataset",
        "data",
        ("max_bytes", "holdout", "vocab_size", "text_field"),
    ),
    (lambda r: bool(r.data.sources), "data.sources are given", "data", ("source",)),
    (_is_far, "data.source is an address", "data", ("max_bytes", "holdout", "vocab_size", "text_field")),
    (lambda r: not _is_far(r), "data is read on this machine", "data.streaming", tuple(StreamingSection.model_fields)),
    *(
        (partial(_other_policy, policy), f'data.mixing.policy is not "{policy}"', "data.mixing", names)
        for policy, names in _OF_POLICY.items()
    ),
    (lambda r: r.data.mixing.policy == "off", 'data.mixing.policy = "off"', "data.mixing", _MIXING),
    (lambda r: r.data.format != "preferences", 'data.format is not "preferences"', "train", ("dpo_beta",)),
    (lambda r: r.train.steps > 0 and r.train.minutes > 0, "train.steps is given", "train", ("minutes",)),
    (lambda r: not r.distill.teacher, "there is no teacher", "distill", _DISTILL),
    (lambda r: bool(r.distill.teacher) and not r.distill.cache, "there is no cache", "distill", ("cache_top_k",)),
    (
        lambda r: bool(r.distill.teacher) and not r.distill.hidden,
        "distill.hidden names no layers",
        "distill",
        ("hidden_weight",),
    ),
    (
        lambda r: bool(r.distill.teacher) and not r.distill.attention,
        "distill.attention names no layers",
        "distill",
        ("attention_weight",),
    ),
    (
        lambda r: bool(r.distill.teacher) and not r.distill.hidden and not r.distill.attention,
        "distill.hidden and distill.attention name no layers",
        "distill",
        ("hidden_projection",),
    ),
    (lambda r: r.data.format == "text", 'data.format = "text"', "data", ("chat_template",)),
    (lambda r: r.data.format != "text", 'data.format is not "text"', "data", ("text_field",)),
    (lambda r: r.model.task == "image_classification", "the task has no text", "data", _TEXT_DATA),
    (lambda r: r.model.task != "image_classification", "the task has no images", "data", ("image_size",)),
    (lambda r: r.model.task != "causal_lm", "only causal_lm writes text", "train", ("sample_tokens",)),
    (lambda r: r.model.task != "causal_lm", "only causal_lm learns text as it is", "data", ("eval_source",)),
    (lambda r: not r.precision.enabled, "precision.enabled = false", "precision", _LOW_PRECISION),
    (lambda r: not r.precision.enabled, "precision.enabled = false", "precision.controller", ("enabled", *_CONTROL)),
    (lambda r: not _fp8_modes(r), "no mode here is one of FP8", "precision", ("fp8_min_gain",)),
    (lambda r: not _scaled_modes(r), "no mode here has matmuls in 8 or 4 bits", "precision", ("bf16_grad_layers",)),
    (lambda r: not (_fp8_modes(r) or _fp8_rules(r)), "nothing here is in FP8", "precision", ("fp8_scale",)),
    (lambda r: not (_fp8_modes(r) or _fp8_rules(r)), "nothing here is in FP8", "parallel", ("param_gather",)),
    (
        lambda r: r.precision.fp8_scale != "power_of_two",
        "scales are no powers of two (precision.fp8_scale)",
        "parallel",
        ("param_gather",),
    ),
    (lambda r: not r.precision.controller.enabled, "there is no controller", "precision.controller", _CONTROL),
    (lambda r: not r.precision.controller.enabled, "there is no controller", "precision", ("lr_noise_damping",)),
    (lambda r: r.precision.loss_scale == "off", 'precision.loss_scale = "off"', "precision", _LOSS_SCALE),
    (
        lambda r: r.precision.loss_scale == "auto" and not r.precision.names_fp16,
        "nothing here is in FP16",
        "precision",
        _LOSS_SCALE,
    ),
    (lambda r: r.precision.fp8_until == 1, "8 bits last to the end", "precision", ("fp8_after",)),
    (lambda r: r.precision.start_mode is None, "there is no start_mode", "precision", ("start_fraction",)),
    (lambda r: r.ops.attention in _UNBLOCKED, "ops.attention is not in blocks", "memory", ("attention_block",)),
    (lambda r: r.model.kind == "hf", 'model.kind = "hf"', "memory", ("attention_block",)),
    (lambda r: r.ops.cross_entropy == "ref", 'ops.cross_entropy = "ref"', "memory", ("loss_chunk_bytes",)),
    (lambda r: not r.memory.can.offload, 'memory.executor = "standard"', "memory", _OFFLOAD),
    (lambda r: _tiers(r) == {"device"}, "everything lives on the device", "memory", ("prefetch",)),
    (lambda r: "disk" not in _tiers(r), "nothing lives on disk", "memory", ("offload_dir",)),
    (lambda r: r.optim.clip == "two_pass", 'optim.clip = "two_pass"', "memory", ("rollback",)),
    (lambda r: not r.checkpoint.export_hf, "checkpoint.export_hf = false", "checkpoint", ("export_format",)),
    (
        lambda r: r.parallel.pp == 1,
        "parallel.pp = 1",
        "parallel",
        ("schedule", "virtual_stages", "split", "balance", "resplit"),
    ),
    (lambda r: r.parallel.tp == 1, "parallel.tp = 1", "parallel", ("sequence_parallel",)),
    (lambda r: r.data.rows != "documents", 'data.rows is not "documents"', "parallel", ("balance",)),
    (
        lambda r: r.parallel.ep == 1,
        "parallel.ep = 1",
        "parallel",
        ("dispatch", "place_experts", "expert_order", "redundant_experts"),
    ),
    (
        lambda r: r.parallel.schedule not in INTERLEAVED,
        "parallel.schedule is not an interleaved one",
        "parallel",
        ("virtual_stages",),
    ),
    (lambda r: r.optim.kind != "muon", 'optim.kind = "adamw"', "optim", ("momentum",)),
    (lambda r: r.optim.schedule != "wsd", 'optim.schedule is not "wsd"', "optim", ("decay_fraction",)),
    (lambda r: r.optim.schedule == "constant", 'optim.schedule = "constant"', "optim", ("min_lr_ratio",)),
)


def without_effect(recipe: Recipe) -> dict[str, str]:
    """Unused settings, without effect: fields that the rest of the recipe makes void, with the setting that does it."""
    rows = [row for row in _VOID if row[0](recipe)]
    return {f"{section}.{name}": why for _, why, section, names in reversed(rows) for name in names}
