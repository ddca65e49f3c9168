"""Tiny decoder shapes and batches that the model tests share."""

from pathlib import Path

import torch
from torch import Tensor

from tilewright.core.hardware import detect_machine
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.hf_weights import load_weights, read_config
from tilewright.ops.kernels import Kernels

KERNELS = Kernels(detect_machine("cpu"), compile=False)
"""Operations that need no compiler, so that tests start at once."""

_BASE = {"vocab_size": 61, "dim": 64, "num_layers": 2, "num_heads": 4, "ffn_dim": 96, "tie_embeddings": False}
_MLA = {"attention": "mla", "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
_EXPERTS = {"num_experts": 8, "num_experts_per_token": 2, "expert_dim": 32, "num_dense_layers": 1}
_GROUPS = {"num_expert_groups": 4, "num_limited_groups": 2, "routed_scaling": 2.5}

SHAPES = {
    "gqa": DecoderConfig.of(**_BASE | {"num_kv_heads": 2}),
    "tied": DecoderConfig.of(**_BASE | {"num_kv_heads": 1, "tie_embeddings": True, "rope_theta": 5e4}),
    "mla": DecoderConfig.of(**_BASE | _MLA),
    "mla_q_rank": DecoderConfig.of(**_BASE | _MLA | {"q_lora_rank": 20}),
    "gqa_moe": DecoderConfig.of(**_BASE | _EXPERTS),
    "deepseek": DecoderConfig.of(**_BASE | _MLA | _EXPERTS | _GROUPS | {"q_lora_rank": 20, "num_shared_experts": 2}),
}

_OWN_GQA = (
    *({"num_heads": 2, "ffn_dim": 40}, {"num_heads": 0}),
    {"num_kv_heads": 4, "ffn_dim": 0, "sliding_window": 5},
)
_OWN_MLA = (
    *({"num_heads": 2, "kv_lora_rank": 16}, {"num_heads": 0, "ffn_dim": 24}, {"ffn_dim": 0}),
    {"q_lora_rank": 12, "sliding_window": 3},
)
MIXED = {
    "own_gqa": DecoderConfig.of(**_BASE | {"num_layers": 3, "num_kv_heads": 2, "layers": _OWN_GQA}),
    "own_moe": DecoderConfig.of(**_BASE | _MLA | _EXPERTS | {"num_layers": 4, "layers": _OWN_MLA}),
}
"""Decoders whose layers have shapes of their own: one has no attention, one no FFN, one a window."""


def make_decoder(name: str | DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(seed)
    model = Decoder((SHAPES | MIXED)[name] if isinstance(name, str) else name, KERNELS)
    init_weights(model, seed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4.0) if param.dim() > 1 else param.add_(torch.randn_like(param) * 0.2)
    return model


def load_decoder(folder: Path, kernels: Kernels | None = None) -> Decoder:
    """The decoder in a Hugging Face folder, parameters in FP32."""
    model = Decoder(read_config(folder), kernels)
    load_weights(model, folder)
    return model


def make_batch(rows: int = 2, positions: int = 16, seed: int = 0, vocab: int = 61) -> dict[str, Tensor]:
    """input_ids and shifted labels, with a few positions without target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, positions + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, positions // 2] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}
