"""The cost of a decoder: parameters, FLOPs and activation bytes, from its shape alone. Pure integers, no torch.

Tests hold every number against real modules, `torch.utils.flop_counter` and the tensors that autograd really saves.
The planner multiplies these by batch, rank and bandwidth; for Hugging Face models count the real module.

Conventions: a multiply-add is 2 FLOPs; element-wise work (norms, softmax, rotary, SwiGLU) is not counted in FLOPs; "a
token" is the mean over the tokens of rows of `seq_len`, each row one document.
"""

from dataclasses import dataclass

from tilewright.models.decoder.config import DecoderConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by place. Tied embeddings count once, under `embedding`.

    Args:
        embedding: the token table. layers: one number per layer: attention, MLP or all experts, router, two norms.
        Without routing biases (buffers). final_norm: the norm before the head. head: the output projection where it is
        not tied. inactive_layers: one number per layer: parameters of routed experts that a token does not pass.
    """

    embedding: int
    layers: tuple[int, ...]
    final_norm: int
    head: int
    inactive_layers: tuple[int, ...]

    @property
    def total(self) -> int:
        """All parameters of a decoder, beside its FLOPs."""
        return self.embedding + sum(self.layers) + self.final_norm + self.head

    @property
    def active(self) -> int:
        """Active parameters of a decoder, that one token passes through, for FLOPs."""
        return self.total - sum(self.inactive_layers)


def count_parameters(config: DecoderConfig) -> ParameterCount:
    """Count the parameters of a decoder, beside its FLOPs.

    Example:
        >>> config = DecoderConfig.of(vocab_size=16384, dim=512, num_layers=12, num_heads=8, ffn_dim=1408)
        >>> count_parameters(config).total
        46936576
    """
    indices = range(config.num_layers)
    return ParameterCount(
        embedding=config.vocab_size * config.dim,
        layers=tuple(layer_parameters(config, layer) for layer in indices),
        final_norm=config.dim,
        head=0 if config.tie_embeddings else config.vocab_size * config.dim,
        inactive_layers=tuple(_inactive_parameters(config, layer) for layer in indices),
    )


def layer_parameters(config: DecoderConfig, layer: int) -> int:
    """Parameters of layer number `layer` of a decoder, for FLOPs."""
    config = config.at(layer)
    norms = config.dim * ((config.num_heads > 0) + (config.ffn_dim > 0))
    if config.attention == "linear" and config.num_heads:
        norms += config.head_dim
    if config.attention == "mla" and config.num_heads:
        norms += config.kv_lora_rank + config.q_lora_rank
    return attention_weights(config) + norms + mlp_weights(config, layer)


def attention_weights(config: DecoderConfig) -> int:
    """Count the elements of a layer's attention projections; each costs 2 FLOPs per token. `config` is the layer's own,
    see `DecoderConfig.at`."""
    if not config.num_heads:
        return 0
    dim, heads = config.dim, config.num_heads
    out = heads * config.value_head_dim * dim
    if config.attention == "linear":
        return dim * heads * (4 * config.head_dim + 2) + out
    if config.attention == "gqa":
        return dim * (heads + 2 * config.num_kv_heads) * config.head_dim + out
    q_dim = heads * config.qk_head_dim
    queries = config.q_lora_rank * (dim + q_dim) if config.q_lora_rank else dim * q_dim
    latent = dim * (config.kv_lora_rank + config.qk_rope_head_dim)
    return queries + latent + config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim) + out


def mlp_weights(config: DecoderConfig, layer: int) -> int:
    """Count the elements of a layer's MLP weights; with experts, those of all experts and of the router."""
    config = config.at(layer)
    if not config.is_moe(layer):
        return 3 * config.dim * config.ffn_dim
    widths = config.num_experts * config.expert_dim + config.shared_width
    return 3 * config.dim * widths + config.num_experts * config.dim


def hidden_width(config: DecoderConfig, layer: int) -> int:
    """The width of the hidden layer of an MLP, or of one expert, for its FLOPs."""
    config = config.at(layer)
    return config.expert_dim if config.is_moe(layer) else config.ffn_dim


def _inactive_parameters(config: DecoderConfig, layer: int) -> int:
    config = config.at(layer)
    if not config.is_moe(layer):
        return 0
    return (config.num_experts - config.num_experts_per_token) * 3 * config.dim * config.expert_dim


@dataclass(frozen=True)
class FlopCount:
    """FLOPs per token of one forward pass.

    Args:
        layers: one number per layer: matmuls with weights.
        attention: one number per layer: scores and weighted values; of linear attention the products of its state with
            a key and a query, and what is added to it.
        head: the output projection.
        last: one number per layer: its last matmul, whose result backward does not need, so it is not recomputed.
    """

    layers: tuple[int, ...]
    attention: tuple[float, ...]
    head: int
    last: tuple[int, ...]

    @property
    def forward(self) -> float:
        """FLOPs of one forward pass."""
        return sum(self.layers) + sum(self.attention) + self.head

    @property
    def backward(self) -> float:
        """FLOPs of backward: two matmuls for each one of forward."""
        return 2 * self.forward

    def step(self, activation_checkpoint: str = "none") -> float:
        """FLOPs of a step, forward and backward as executed: flash attention's backward forms its scores again (2.5
        times its forward), "full" runs each layer up to its last matmul once more, "attention" the same without
        attention, "matmuls" attention alone, "selective" neither."""
        attention = sum(self.attention)
        again = sum(self.layers) - sum(self.last) if activation_checkpoint in ("full", "attention") else 0
        again += attention if activation_checkpoint in ("full", "matmuls") else 0
        return self.forward + self.backward + 0.5 * attention + again


def count_flops(config: DecoderConfig, seq_len: int, *, causal: bool = True) -> FlopCount:
    """FLOPs per token in rows of `seq_len`.

    Args:
        causal: count the pairs that a causal mask leaves (half, and the diagonal) and the layer's window; False counts
            all S x S pairs, as `torch.utils.flop_counter` does.

    Example:
        >>> config = DecoderConfig.of(vocab_size=16384, dim=512, num_layers=12, num_heads=8, ffn_dim=1408)
        >>> round(count_flops(config, 512).forward / 1e6)
        100
    """
    shapes = [config.at(layer) for layer in range(config.num_layers)]
    layers = tuple(
        2 * (attention_weights(shape) + mlp_weights(shape, layer) - _inactive_parameters(shape, layer))
        for layer, shape in enumerate(shapes)
    )
    attention = tuple(_attention_flops(shape, seq_len, causal=causal) for shape in shapes)
    last = tuple(2 * config.dim * _last_width(shape, layer) for layer, shape in enumerate(shapes))
    return FlopCount(layers, attention, 2 * config.vocab_size * config.dim, last)


def _attention_flops(config: DecoderConfig, seq_len: int, *, causal: bool) -> float:
    if config.attention == "linear":
        return 6.0 * config.num_heads * config.head_dim**2
    keys = mean_keys(seq_len, config.sliding_window) if causal else seq_len
    return 2 * config.num_heads * (config.qk_head_dim + config.value_head_dim) * keys


def mean_keys(seq_len: int, window: int = 0) -> float:
    """The mean number of keys that a position of a row attends to, itself included, for FLOPs of attention.

    Args:
        seq_len: positions of the row.
        window: positions that each one sees at most; 0: all before it.

    Example:
        >>> mean_keys(7), mean_keys(7, window=1), mean_keys(4, window=2)
        (4.0, 1.0, 1.75)
    """
    most = min(window or seq_len, seq_len)
    return most - most * (most - 1) / (2 * seq_len)


def _last_width(config: DecoderConfig, layer: int) -> int:
    """The number of input features of a layer's last matmul, for its FLOPs."""
    if not config.ffn_dim:
        return config.num_heads * config.value_head_dim
    return config.shared_width if config.is_moe(layer) else config.ffn_dim
