"""The zoo: families of transformers' models, each as a tiny config with random weights, and short batches for them.

Nothing is downloaded. All language models have one vocabulary, so that one tokenizer serves all. Weights are drawn with
a standard deviation of 0.1: at the usual 0.02 a block of width 64 adds almost nothing to its stream, and an error in it
would not be seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.models.shapes import KERNELS
from tilewright.models.hf.load import load_hf
from tilewright.models.hf.model import HFModel, Task

Kind = Literal["causal", "masked", "vision", "audio", "experts", "state space", "encoder-decoder"]
VOCAB = 320
POSITIONS = 64
IMAGE = 32
CLASSES = 2
"""As many as there are layers: a classifier's head beside the layers must not be taken for a router."""


@dataclass(frozen=True)
class Family:
    """One architecture. `routers`: layers of the tiny model that choose between experts."""

    name: str
    kind: Kind
    sizes: Mapping[str, Any] = field(hash=False, repr=False)
    auto: str = "AutoModelForCausalLM"
    task: Task | None = "causal_lm"
    """What tilewright trains it as; None: nothing, it is converted only."""
    routers: int = 0
    batch: Literal["text", "image", "sound"] = "text"
    training: bool = False
    """The plain model is in training mode, because it has no gradient in evaluation mode."""

    def config(self, **changes: Any) -> Any:
        """The transformers config."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.name, **{**self.sizes, **changes})

    def net(self, seed: int = 0) -> nn.Module:
        """The plain transformers model in FP32, without dropout."""
        import transformers
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.manual_seed(seed)
        return getattr(transformers, self.auto).from_config(self.config(), dtype=torch.float32).train(self.training)

    def model(self, seed: int = 0) -> HFModel:
        """The model as a run has it, in the mode in which `net` is."""
        torch.manual_seed(seed)
        assert self.task is not None
        return load_hf(self.config(), self.task, kernels=KERNELS).train(self.training)

    def inputs(self, rows: int = 2, seed: int = 0) -> dict[str, Tensor]:
        """What transformers' model is called with, labels among it."""
        generator = torch.Generator().manual_seed(seed)
        if self.batch == "image":
            labels = torch.arange(rows) % CLASSES
            return {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE, generator=generator), "labels": labels}
        if self.batch == "sound":
            labels = torch.randint(1, 32, (rows, 6), generator=generator)
            return {"input_values": torch.randn(rows, 800, generator=generator), "labels": labels}
        ids = torch.randint(4, VOCAB, (rows, 12), generator=generator)
        wanted = torch.arange(12) % 5 == 2 if self.task == "masked_lm" else torch.ones(12, dtype=torch.bool)
        return {"input_ids": ids, "labels": torch.where(wanted, ids, -100)}

    def rows(self, rows: int = 2, seed: int = 0) -> dict[str, Tensor]:
        """A micro-batch as a run has it: labels of causal models are shifted."""
        batch = self.inputs(rows, seed)
        if self.task == "causal_lm":
            batch["labels"] = torch.cat((batch["labels"][:, 1:], torch.full((rows, 1), -100)), dim=1)
        return batch


def _masked(name: str, sizes: Mapping[str, Any]) -> Family:
    return Family(name, "masked", sizes, "AutoModelForMaskedLM", "masked_lm")


def _image(name: str, sizes: Mapping[str, Any]) -> Family:
    sizes = {"num_labels": CLASSES, **sizes}
    return Family(name, "vision", sizes, "AutoModelForImageClassification", "image_classification", batch="image")


def _experts(name: str, sizes: Mapping[str, Any], routers: int = 2) -> Family:
    return Family(name, "experts", sizes, routers=routers)


_WIDE = {"initializer_range": 0.1}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_BASE = _SHAPE | _WIDE | {"num_attention_heads": 4, "max_position_embeddings": POSITIONS}
_GROUPED = _BASE | _IDS | {"num_key_value_heads": 2}
_HEADED = _GROUPED | {"head_dim": 16}
_SHORT = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS} | _WIDE
_IMAGE = _WIDE | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE |= {"image_size": IMAGE, "patch_size": 8}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
_FOUR_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SSM = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8} | _IDS | _WIDE
_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
_TWO_SIDES = {
    "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "init_std": 0.1, "dropout": 0.0,
    **_IDS,
}  # fmt: skip

FAMILIES = (
    Family("gpt2", "causal", _SHORT | {"bos_token_id": 1, "eos_token_id": 2}),
    Family("gptj", "causal", _SHORT | {"rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2}),
    Family("gpt_neox", "causal", _BASE | _IDS),
    Family(
        "opt",
        "causal",
        {
            "vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 64, "max_position_embeddings": POSITIONS, "init_std": 0.1, **_IDS,
        },
    ),
    Family("bloom", "causal", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4} | _IDS | _WIDE),
    Family(
        "falcon",
        "causal",
        {
            "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": POSITIONS, "new_decoder_architecture": True, "num_kv_heads": 2, **_IDS, **_WIDE,
        },
    ),
    Family("llama", "causal", _GROUPED),
    Family("mistral", "causal", _HEADED),
    Family("qwen2", "causal", _GROUPED),
    Family("qwen3", "causal", _HEADED | {"tie_word_embeddings": True}),
    Family("gemma2", "causal", _HEADED | {"query_pre_attn_scalar": 16, "sliding_window": 8}),
    Family("gemma3_text", "causal", _HEADED | {"query_pre_attn_scalar": 16, "sliding_window": 8}),
    Family("phi", "causal", _GROUPED),
    Family("phi3", "causal", _GROUPED),
    Family("olmo2", "causal", _GROUPED),
    Family("smollm3", "causal", _GROUPED),
    Family("glm4", "causal", _HEADED),
    Family("granite", "causal", _GROUPED),
    Family("cohere2", "causal", _GROUPED | {"sliding_window": 8}),
    Family("stablelm", "causal", _GROUPED),
    Family("starcoder2", "causal", _GROUPED),
    Family("nemotron", "causal", _HEADED),
    Family("exaone4", "causal", _GROUPED | {"sliding_window": 8}),
    _masked("bert", _BASE),
    _masked("roberta", _BASE | {"pad_token_id": 1}),
    _masked(
        "distilbert",
        {
            "vocab_size": VOCAB, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4,
            "max_position_embeddings": POSITIONS, **_WIDE,
        },
    ),
    _masked("electra", _BASE | {"embedding_size": 64}),
    _masked("deberta-v2", _BASE),
    _masked(
        "modernbert",
        _BASE | _IDS | {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 8},
    ),
    _masked("albert", _BASE | {"embedding_size": 32}),
    _image("vit", _IMAGE),
    _image("beit", _IMAGE | {"out_indices": [1]}),
    _image("dinov2", _IMAGE | {"mlp_ratio": 2}),
    _image(
        "swin",
        {
            "image_size": IMAGE, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4],
            "window_size": 4, **_WIDE,
        },
    ),
    _image("convnext", {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]} | _WIDE),
    _image("resnet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    Family(
        "whisper",
        "audio",
        _TWO_SIDES | {
            "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": POSITIONS,
            "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
        },
    ),
    Family(
        "wav2vec2",
        "audio",
        _BASE | {
            "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
        },
        "AutoModelForCTC",
        task=None,
        batch="sound",
    ),
    _experts("mixtral", _GROUPED | _FOUR_LOCAL),
    _experts("qwen2_moe", _GROUPED | _FOUR | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    _experts("qwen3_moe", _HEADED | _FOUR | {"moe_intermediate_size": 32}),
    _experts(
        "deepseek_v3",
        _GROUPED | _LATENT | {
            "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        },
        routers=1,
    ),
    _experts(
        "glm4_moe",
        _HEADED | {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1,
        },
        routers=1,
    ),
    _experts("gpt_oss", _HEADED | _FOUR_LOCAL | {"sliding_window": 8, "intermediate_size": 64}),
    _experts("olmoe", _GROUPED | _FOUR),
    _experts("granitemoe", _GROUPED | _FOUR_LOCAL),
    _experts("phimoe", _GROUPED | _FOUR_LOCAL),
    _experts("hunyuan_v1_moe", _HEADED | {"num_experts": 4, "moe_topk": 2}),
    _experts("jetmoe", _GROUPED | _FOUR_LOCAL | {"kv_channels": 16, "num_attention_heads": 4}, routers=4),
    _experts(
        "afmoe",
        _HEADED | _FOUR | {"moe_intermediate_size": 32, "num_dense_layers": 1, "sliding_window": 8},
        routers=1,
    ),
    _experts(
        "longcat_flash",
        _IDS | _WIDE | _LATENT | {
            "vocab_size": VOCAB, "hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 2, "num_attention_heads": 4,
            "head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "moe_topk": 2,
            "max_position_embeddings": POSITIONS,
        },
    ),
    _experts(
        "ernie4_5_moe",
        _GROUPED | {
            "moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        routers=1,
    ),
    _experts("minimax", _HEADED | _FOUR_LOCAL | {"block_size": 8}),
    _experts(
        "qwen3_next",
        _HEADED | _FOUR | _DELTA | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    Family("qwen3_5_text", "state space", _HEADED | _DELTA),
    Family("mamba", "state space", _SSM),
    Family("mamba2", "state space", _SSM | {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    Family(
        "falcon_h1",
        "state space",
        _HEADED | {
            "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8,
            "mamba_n_groups": 1,
        },
    ),
    Family(
        "jamba",
        "state space",
        _GROUPED | {
            "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2,
            "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
        },
        routers=1,
    ),
    Family(
        "bamba",
        "state space",
        _GROUPED | {
            "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8,
            "attn_layer_indices": [1],
        },
    ),
    Family(
        "zamba2",
        "state space",
        _GROUPED | {
            "mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 8, "chunk_size": 8, "hybrid_layer_ids": [1],
            "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1,
        },
    ),
    Family(
        "rwkv",
        "state space",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "context_length": POSITIONS,
         "attention_hidden_size": 64},
        training=True,  # in evaluation it rescales weights in place
    ),
    Family("recurrent_gemma", "state space", _HEADED | {
        "lru_width": 64, "attention_window_size": 8, "num_hidden_layers": 3,
    }),
    Family("lfm2", "state space", _GROUPED | {"full_attn_idxs": [1], "block_ff_dim": 96}),
    Family(
        "t5",
        "encoder-decoder",
        {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0, "dropout_rate": 0.0},
        "AutoModelForSeq2SeqLM",
    ),
    Family(
        "bart",
        "encoder-decoder",
        _TWO_SIDES | {
            "max_position_embeddings": POSITIONS, "decoder_start_token_id": 2, "forced_eos_token_id": None,
        },
        "AutoModelForSeq2SeqLM",
    ),
)  # fmt: skip
TRAINED = tuple(family for family in FAMILIES if family.task is not None)
