"""Models that units are cut from, in FP64 with weights large enough that a wrong cut shows, and units set to zero by
hand: where a unit gives out nothing, a model without it is the same function."""

import torch
from torch import nn

from tests.models.shapes import KERNELS, SHAPES
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.load import load_hf

VOCAB = 61
_LM = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_ENCODER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
FOREIGN = {
    "Llama": ("causal_lm", _LM),
    "Llama tied": ("causal_lm", _LM | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "Llama biased": ("causal_lm", _LM | {"attention_bias": True, "mlp_bias": True}),
    "Mistral": ("causal_lm", _LM | {"head_dim": 20, "sliding_window": 8}),
    "Qwen2": ("causal_lm", _LM | {"num_attention_heads": 8}),
    "Qwen3": ("causal_lm", _LM | {"head_dim": 24, "tie_word_embeddings": True}),
    "Phi3": ("causal_lm", _LM | {"pad_token_id": 0}),
    "GPT2": (
        "causal_lm",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    ),
    "Bert": ("masked_lm", _ENCODER | {"vocab_size": VOCAB, "max_position_embeddings": 64}),
    "ViT": ("image_classification", _ENCODER | {"image_size": 32, "patch_size": 8, "num_labels": 5}),
    "Mixtral": ("causal_lm", _LM | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepseekV3": (
        "causal_lm",
        _LM | {
            "num_key_value_heads": 4, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2,
            "moe_intermediate_size": 40, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 20,
            "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12,
        },
    ),
}  # fmt: skip


@torch.no_grad()
def drawn(model: nn.Module) -> nn.Module:
    """All parameters drawn, norms around one; in FP64, in evaluation mode."""
    for param in model.parameters():
        noise = torch.randn(param.shape, dtype=torch.float64) * 0.15
        param.data = noise + 1 if param.dim() == 1 and bool((param == 1).all()) else noise
    model.double().tie_weights()
    return model.eval()


def foreign(name: str, **changes):
    """A model of transformers."""
    import transformers

    task, values = FOREIGN[name]
    config = getattr(transformers, f"{name.split()[0]}Config")(**values | changes)
    model = load_hf(config, task, kernels=KERNELS)
    model.net.set_experts_implementation("eager")  # torch's grouped matmul has no FP64
    return drawn(model)


def ours(name: str, **changes) -> Decoder:
    """Our decoder of a shape in `tests.models.shapes`, three layers deep unless changed."""
    values = {field: getattr(SHAPES[name], field) for field in SHAPES[name].__dataclass_fields__}
    config = DecoderConfig(**values | {"num_layers": 3} | changes)
    return drawn(Decoder(config, KERNELS))


def batch_of(model) -> dict[str, torch.Tensor]:
    """Two rows that the model learns from."""
    if model.task == "image_classification":
        labels = torch.randint(5, (2,))
        return {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64), "labels": labels}
    ids = torch.randint(1, VOCAB, (2, 12))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


__all__ = ["FOREIGN", "VOCAB", "batch_of", "drawn", "foreign", "ours"]
