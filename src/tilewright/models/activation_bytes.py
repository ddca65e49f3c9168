"""Bytes that a decoder's layers keep from forward to backward, from its shape alone. Pure integers, no torch.

Held against the tensors that autograd really saves (tests/models/test_activation_bytes.py). Three things decide: the
checkpoint mode; the bytes of the residual stream and of products (bf16_mixed 2 and 2, hybrid 4 and 2, fp32 4 and 4);
and whether layers are compiled, because eager RMSNorm and SwiGLU keep FP32 intermediates that a compiled layer does
not. Read by `plan.cost`.

    num_tokens * sum(layer_bytes(...)) + sum(weight_copy_bytes(...)) + head_bytes(...)

Selective and full modes rebuild one layer at a time in backward: add that layer's bytes in mode "none" to the peak.

Legend in names: dim D, hidden F, heads H, experts a token K.
"""

from dataclasses import dataclass

from tilewright.models.config import ActivationCheckpoint, DecoderConfig
from tilewright.models.count import attention_weights, mlp_weights

FP32 = 4
_INT64 = 8


@dataclass(frozen=True)
class Storage:
    """What activations are kept in.

    Args:
        stream: bytes an element of the residual stream.
        product: bytes an element of what matrix products take and return.
        compiled: whether `compile_blocks` was called.
    """

    stream: int = 2
    product: int = 2
    compiled: bool = True


def layer_bytes(config: DecoderConfig, layer: int, mode: ActivationCheckpoint, storage: Storage) -> int:
    """Bytes a token that layer number `layer` keeps for backward, its input included.

    Example:
        >>> from tilewright.models.presets import PRESETS
        >>> [layer_bytes(PRESETS["cpu_50m"], 0, mode, Storage()) for mode in ("none", "selective", "full")]
        [16680, 11808, 1024]
    """
    entry = config.dim * storage.stream
    if mode == "full":
        return entry
    moe = config.is_moe(layer)
    if mode == "selective":
        if moe and storage.compiled:  # compiled parts are opaque to the eager checkpoint around them
            return entry + FP32 * config.num_experts
        return entry + _products_kept(config, moe, storage)
    return _attention_none(config, storage) + (_moe_none if moe else _dense_none)(config, storage)


def weight_copy_bytes(
    config: DecoderConfig, layer: int, mode: ActivationCheckpoint, storage: Storage, parameter_bytes: int = 4
) -> int:
    """Bytes of low-precision weight copies that a layer keeps for backward, whatever the number of tokens."""
    if mode != "none" or storage.product >= parameter_bytes:
        return 0
    router = config.num_experts * config.dim if config.is_moe(layer) else 0
    return storage.product * (attention_weights(config) + mlp_weights(config, layer) - router)


def head_bytes(config: DecoderConfig, num_tokens: int, storage: Storage) -> int:
    """Bytes that final norm and loss keep for backward: FP32 input and normalised input, and both finished
    gradients of the head (`ops.loss`: for x in the products' format, for the weight in FP32)."""
    norm = num_tokens * (2 * FP32 * config.dim + FP32)
    return norm + num_tokens * config.dim * storage.product + config.vocab_size * config.dim * FP32


def _latent(config: DecoderConfig) -> int:
    return config.kv_lora_rank + config.qk_rope_head_dim


def _kv_width(config: DecoderConfig) -> int:
    """Width of keys, and of values, of a GQA layer."""
    return config.num_kv_heads * config.head_dim


def _products_kept(config: DecoderConfig, moe: bool, storage: Storage) -> int:
    """Selective: outputs of products and of attention with its log-sum-exp."""
    heads = config.num_heads * config.qk_head_dim
    if config.attention == "gqa":
        projections = heads + 2 * _kv_width(config)
    else:
        expanded = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        projections = config.q_lora_rank + heads + _latent(config) + expanded
    elements = projections + heads + config.dim  # attention's output is as wide as its queries
    statistics = FP32 * config.num_heads
    if moe:
        shared = 2 * config.num_shared_experts * config.expert_dim + (config.dim if config.num_shared_experts else 0)
        elements += config.num_experts_per_token * (2 * config.expert_dim + config.dim) + shared
        return storage.product * elements + statistics + FP32 * config.num_experts
    # A compiled layer sees that nobody needs the last product's output in backward.
    elements += 2 * config.ffn_dim + (0 if storage.compiled else config.dim)
    return storage.product * elements + statistics


def _norm_none(config: DecoderConfig, storage: Storage, num_consumers: int) -> int:
    """A norm over the stream and the copies of its output that products keep."""
    if storage.compiled:
        return config.dim * (storage.stream + storage.product) + FP32
    copies = 1 if storage.stream == storage.product else num_consumers
    return config.dim * (2 * FP32 + copies * storage.product) + FP32


def _inner_norm(width: int, source: int, storage: Storage) -> int:
    """MLA's norm over a compressed vector that lies in a tensor of `source` elements."""
    if storage.compiled:
        return storage.product * (source + width) + FP32
    kept = FP32 * source if storage.product == FP32 else FP32 * width
    return kept + width * (FP32 + storage.product) + FP32


def _attention_none(config: DecoderConfig, storage: Storage) -> int:
    heads = config.num_heads * config.qk_head_dim
    statistics = FP32 * config.num_heads
    norm = _norm_none(config, storage, 3 if config.attention == "gqa" else 2)
    if config.attention == "gqa":
        keys_values = 2 * (heads if storage.compiled else _kv_width(config))
        return norm + storage.product * (2 * heads + keys_values) + statistics
    inner = _inner_norm(config.kv_lora_rank, _latent(config), storage)
    if config.q_lora_rank:
        inner += _inner_norm(config.q_lora_rank, config.q_lora_rank, storage)
    values = config.num_heads * config.v_head_dim
    padded = values if config.v_head_dim < config.qk_head_dim else 0  # values are padded to the keys' width
    return norm + inner + storage.product * (4 * heads + padded) + statistics


def _swiglu(width: int, storage: Storage) -> int:
    """gate, up and their product; eager also keeps silu(gate), and the first three in FP32."""
    return width * (3 * storage.product if storage.compiled else 3 * FP32 + storage.product)


def _dense_none(config: DecoderConfig, storage: Storage) -> int:
    if storage.compiled:  # the stream in the middle is rebuilt from the input and attention's output
        return 2 * config.dim * storage.product + FP32 + _swiglu(config.ffn_dim, storage)
    return _norm_none(config, storage, 2) + _swiglu(config.ffn_dim, storage)


def _moe_none(config: DecoderConfig, storage: Storage) -> int:
    dim, chosen = config.dim, config.num_experts_per_token
    norm = dim * (storage.stream if storage.compiled else 2 * FP32) + FP32
    same = storage.stream == storage.product
    router = dim * FP32 + FP32 * (config.num_experts + 1) + chosen * (3 * _INT64 + 2 * FP32)
    copies = 1 if same or storage.compiled else 2
    rows = chosen * dim * storage.product * (copies + 1)
    shared = 0
    if config.num_shared_experts:
        own_input = 0 if same and storage.stream == FP32 else copies * dim * storage.product
        shared = own_input + _swiglu(config.num_shared_experts * config.expert_dim, storage)
    return norm + router + rows + chosen * _swiglu(config.expert_dim, storage) + shared
