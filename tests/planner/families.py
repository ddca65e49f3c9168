"""Model families of transformers for plans: config.json of 5 to 40 million parameters, wide and long enough that what
a layer keeps outweighs the noise of a process."""

from dataclasses import dataclass
from typing import Any

VOCAB = 4096
_DEPTH = {"num_hidden_layers": 6}
_TEXT = {"vocab_size": VOCAB, "hidden_size": 320, "max_position_embeddings": 512, **_DEPTH}
_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 5, "tie_word_embeddings": True}
_SWIGLU = {**_TEXT, **_HEADS, "intermediate_size": 896, "head_dim": 64}
_MOE = {**_SWIGLU, "num_hidden_layers": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """One family: the config.json's fields, what it learns, and the batch that is run."""

    name: str
    config: dict[str, Any]
    task: str = "causal_lm"
    micro_batch_size: int = 8
    seq_len: int = 256
    image_size: int = 0


def _text(name: str, fields: dict[str, Any], **more: Any) -> Family:
    return Family(name, {"model_type": name.split("-")[0], **fields}, **more)


CAUSAL = (
    _text("llama", _SWIGLU),
    _text("qwen3", _SWIGLU),
    _text("gpt2", {"vocab_size": VOCAB, "n_embd": 320, "n_layer": 6, "n_head": 5, "n_positions": 512}),
    _text("gpt_neox", {**_TEXT, "num_attention_heads": 5, "intermediate_size": 1280}),
    _text("opt", {**_TEXT, "num_attention_heads": 5, "ffn_dim": 1280, "word_embed_proj_dim": 320}),
    _text("gemma3_text", {**_SWIGLU, "sliding_window": 128}),
)
EXPERTS = (
    _text("mixtral", {**_MOE, "num_local_experts": 8}),
    _text("qwen3_moe", {**_MOE, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}),
    _text("gpt_oss", {**_MOE, "num_local_experts": 8, "intermediate_size": 384, "sliding_window": 128}),
    _text(
        "deepseek_v3",
        {
            **_MOE, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "n_group": 4,
            "topk_group": 2, "kv_lora_rank": 64, "q_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
            "v_head_dim": 64, "first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 32,
        },
    ),
)  # fmt: skip
STATE_SPACE = (
    _text(
        "mamba", {"vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 4, "state_size": 16}, micro_batch_size=4
    ),
    _text(
        "mamba2",
        {
            "vocab_size": VOCAB,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_heads": 8,
            "head_dim": 64,
            "state_size": 32,
            "n_groups": 1,
            "chunk_size": 64,
        },
        micro_batch_size=4,
    ),
    _text(
        "falcon_h1",
        {
            **_SWIGLU,
            "num_hidden_layers": 4,
            "mamba_d_ssm": 320,
            "mamba_n_heads": 5,
            "mamba_d_head": 64,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 64,
        },
        micro_batch_size=4,
    ),
    _text(
        "jamba",
        {
            **_MOE,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 16,
            "use_mamba_kernels": False,
        },
        micro_batch_size=4,
    ),
)
MASKED = (
    _text("bert", {**_TEXT, "num_attention_heads": 5, "intermediate_size": 1280}, task="masked_lm"),
    _text("modernbert", {**_TEXT, "num_attention_heads": 5, "intermediate_size": 896, "local_attention": 64,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
          task="masked_lm"),
)  # fmt: skip
_VISION = {"image_size": 128, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
_IMAGES: dict[str, Any] = {"task": "image_classification", "micro_batch_size": 16, "image_size": 128}
VISION = (
    _text("vit", {**_VISION, "patch_size": 8, "intermediate_size": 1024}, **_IMAGES),
    _text("convnext", {"image_size": 128, "depths": [2, 2, 4, 2], "hidden_sizes": [64, 128, 256, 512]}, **_IMAGES),
    _text("swin", {"image_size": 128, "embed_dim": 64, "depths": [2, 2, 4, 2], "num_heads": [2, 4, 8, 16],
                   "window_size": 4}, **_IMAGES),
)  # fmt: skip
FAMILIES = {family.name: family for family in (*CAUSAL, *EXPERTS, *STATE_SPACE, *MASKED, *VISION)}
