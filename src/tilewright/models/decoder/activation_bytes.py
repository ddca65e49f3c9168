"""Bytes that a decoder's layers keep from forward to backward, from its shape alone. Pure integers, no torch.

Held against the tensors that autograd really saves (tests/models/test_activation_bytes.py). Three things decide: the
checkpoint mode; the bytes of the residual stream and of matmuls (bf16_mixed 2 and 2, hybrid 4 and 2, fp32 4 and 4);
and whether layers are compiled, because eager RMSNorm and SwiGLU keep FP32 intermediates that a compiled layer does
not. Linear layers that keep their input in 8 bits, for their weight's gradient, are named in `Storage.qdata`: one copy
serves those that read the same input. Read by `planner.model.decoder_shape`.

    num_tokens * sum(layer_bytes(...)) + sum(tile_bytes(...)) + sum(weight_copy_bytes(...)) + head_bytes(...)

Selective and full modes rebuild one layer at a time in backward: add that layer's bytes in mode "none" to the peak.

Legend in names: dim D, hidden F, heads H, experts a token K.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilewright.core.config.recipe import ActivationCheckpoint, CheckpointInputs
from tilewright.models.decoder.config import DecoderConfig

if TYPE_CHECKING:
    from tilewright.formats.tiled import OperandFormat

FP32 = 4
_INT64 = 8
TILE = 128
"""Elements that share a scale of a layer's input that is kept rounded (`train.checkpoint_inputs`)."""


@dataclass(frozen=True)
class Storage:
    """The dtypes of kept activations.

    Args:
        stream: bytes per element of the residual stream.
        matmul: bytes per element of the tensors that matmuls take and return.
        compiled: whether `compile_blocks` was called.
        inputs: what a layer that is recomputed whole keeps of its input.
        tiled: linear layers of the layer, by role (see `role`), that keep no copy of their weight, because they read
            the weight itself or codes that someone else keeps.
        qdata: those of them that keep their input in codes, with its format.
        fused: those of them that take it in 8 bits from the norm or SwiGLU before them, if all its readers do so.
        spread: experts are on several ranks: a layer that is recomputed keeps which ones its tokens went to.
        slices: ranks that each have as many positions of the residual stream (`parallel.sequence_parallel`).
        cut_codes: slices are whole tiles, so codes that a norm makes are kept in slices too.
    """

    stream: int = 2
    matmul: int = 2
    compiled: bool = True
    inputs: CheckpointInputs = "exact"
    tiled: frozenset[str] = frozenset()
    qdata: Mapping[str, "OperandFormat"] = field(default_factory=dict)
    fused: frozenset[str] = frozenset()
    spread: bool = False
    slices: int = 1
    cut_codes: bool = False

    @property
    def grouped(self) -> bool:
        """True if experts run as one operation on rows padded to whole tiles, as activation bytes count."""
        forms = [self.qdata.get(f"experts.{name}") for name in _MLP]
        return all(form is not None and form.in_rows for form in forms)


_MLP = ("gate_proj", "up_proj", "down_proj")


def role(fqn: str) -> str:
    """Role of a linear layer in a decoder's activation bytes, by its name.

    Example:
        >>> role("model.layers.0.self_attn.q_proj"), role("model.layers.1.mlp.experts.3.up_proj")
        ('q_proj', 'experts.up_proj')
    """
    parts = fqn.split(".")
    owner = next((part for part in parts if part in ("experts", "shared_experts")), "")
    return f"{owner}.{parts[-1]}" if owner else parts[-1]


def layer_bytes(config: DecoderConfig, layer: int, mode: ActivationCheckpoint, storage: Storage) -> int:
    """Activation bytes a token that layer number `layer` keeps for backward, its input included.

    Example:
        >>> from typing import get_args
        >>> config = DecoderConfig.of(vocab_size=16384, dim=512, num_layers=12, num_heads=8, ffn_dim=1408)
        >>> [layer_bytes(config, 0, mode, Storage()) for mode in get_args(ActivationCheckpoint)]
        [16680, 11808, 10752, 2080, 1024]
    """
    config = config.at(layer)
    entry = config.dim * storage.stream // storage.slices
    moe = config.is_moe(layer)
    if moe and storage.spread and mode != "none":
        entry += _INT64 * config.num_experts_per_token
    if mode == "full":
        exact = storage.inputs == "exact" or moe
        return entry if exact else (config.dim + FP32 * -(-config.dim // TILE)) // storage.slices
    if mode in ("selective", "matmuls"):
        if moe and storage.compiled:  # compiled parts are opaque to the eager checkpoint around them
            seen = config.num_experts_per_token * (2 * config.expert_dim + config.dim) if storage.grouped else 0
            return entry + FP32 * config.num_experts + storage.matmul * seen
        attention = _attention_kept(config, storage) if mode == "selective" else 0
        return entry + _matmuls_kept(config, moe, storage) + attention
    if mode == "attention":
        return entry + (0 if moe and storage.compiled else _attention_kept(config, storage))
    kept = _attention_none(config, storage) if config.num_heads else 0
    if config.ffn_dim:
        kept += (_moe_none if moe else _dense_none)(config, storage)
    return kept


def tile_bytes(
    config: DecoderConfig,
    layer: int,
    mode: ActivationCheckpoint,
    storage: Storage,
    num_tokens: int,
    expert_rows: int | None = None,
) -> int:
    """Bytes that FP8 inputs add to `layer_bytes`: scales of tiles, and the rows that experts are padded with.

    Args:
        num_tokens: of a micro-batch.
        expert_rows: of all experts with their padding; None takes what is expected, half a tile for each.
    """
    config = config.at(layer)
    moe = config.is_moe(layer)
    chosen = config.num_experts_per_token * num_tokens if moe else 0
    rows = chosen if expert_rows is None else expert_rows
    if storage.grouped and expert_rows is None:
        rows += config.num_experts * storage.qdata["experts.gate_proj"].tile.cols // 2
    padding = rows - chosen if moe and storage.grouped else 0
    matmuls = storage.matmul * 2 * config.expert_dim
    if mode != "none":
        return padding * (matmuls + storage.matmul * config.dim) if mode in ("selective", "matmuls") else 0
    shapes = _linears(config, layer)
    readers = [(roles, num_tokens) for roles in _readers(config, layer)]
    if moe:
        readers += [(("experts.gate_proj", "experts.up_proj"), rows), (("experts.down_proj",), rows)]
    scales = sum(
        form.scale_bytes((shapes[roles[0]][0], length))  # transposed: along the tokens
        for roles, length in readers
        for form in {storage.qdata[name] for name in roles if name in storage.qdata}
    )
    return scales + padding * (config.dim + config.expert_dim + matmuls)


def weight_copy_bytes(
    config: DecoderConfig, layer: int, mode: ActivationCheckpoint, storage: Storage, parameter_bytes: int = 4
) -> int:
    """Activation bytes of low-precision weight copies that a layer keeps for backward, whatever the number of
    tokens."""
    if mode != "none" or storage.matmul >= parameter_bytes:
        return 0
    config = config.at(layer)
    copied = {name: shape for name, shape in _linears(config, layer).items() if name not in storage.tiled}
    many = config.num_experts
    elements = (a * b * (many if name.startswith("experts.") else 1) for name, (a, b) in copied.items())
    return storage.matmul * sum(elements)


def _linears(config: DecoderConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Features in and out of each linear layer by role, without the router, for activation bytes."""
    found = _attention_linears(config) if config.num_heads else {}
    widths = {"": config.ffn_dim}
    if config.is_moe(layer):
        widths = {"experts.": config.expert_dim, "shared_experts.": config.shared_width}
    for owner, width in widths.items():
        if width:
            shapes = ((config.dim, width), (config.dim, width), (width, config.dim))
            found |= {owner + name: shape for name, shape in zip(_MLP, shapes, strict=True)}
    return found


def _attention_linears(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    dim, heads = config.dim, config.num_heads
    q_dim, value_dim = heads * config.qk_head_dim, heads * config.value_head_dim
    if config.attention == "linear":
        found = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), (dim, q_dim))
        found |= dict.fromkeys(("a_proj", "b_proj"), (dim, heads))
    elif config.attention == "gqa":
        found = {"q_proj": (dim, q_dim), "k_proj": (dim, _kv_width(config)), "v_proj": (dim, _kv_width(config))}
    else:
        rank = config.q_lora_rank
        found = {"q_a_proj": (dim, rank), "q_b_proj": (rank, q_dim)} if rank else {"q_proj": (dim, q_dim)}
        found["kv_a_proj_with_mqa"] = (dim, _latent(config))
        found["kv_b_proj"] = (config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
    return found | {"o_proj": (value_dim, dim)}


_TOGETHER = (
    (*("q_proj", "q_a_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa"), "g_proj", "a_proj", "b_proj"),
    *(("q_b_proj",), ("kv_b_proj",), ("o_proj",)),
    *(("gate_proj", "up_proj"), ("down_proj",)),
    *(("shared_experts.gate_proj", "shared_experts.up_proj"), ("shared_experts.down_proj",)),
)
"""Layers that read one input, routed experts left out."""


def shared_input(fqn: str) -> tuple[str, int]:
    """The input that a linear layer shares with others, as a name: equal for layers that read the same.

    Example:
        >>> shared_input("layers.0.self_attn.q_proj") == shared_input("layers.0.self_attn.v_proj")
        True
    """
    parent, name = fqn.rpartition(".")[0], role(fqn)
    groups = [index for index, names in enumerate(_TOGETHER) if name in names or f"shared_{name}" in names]
    return (parent, groups[0]) if groups else (fqn, -1)


def _readers(config: DecoderConfig, layer: int) -> list[tuple[str, ...]]:
    """The groups of `_TOGETHER` of a layer's linear layers that read one input."""
    known = _linears(config, layer)
    groups = (tuple(name for name in names if name in known) for names in _TOGETHER)
    return [names for names in groups if names]


def _kept_input(storage: Storage, width: int, *readers: str) -> int:
    """Bytes per token that an input of linear layers keeps: as it is for layers that read it so, and its codes for the
    others."""
    plain = [name for name in readers if name not in storage.qdata]
    copies = 1 if storage.stream == storage.matmul or storage.compiled else len(plain)
    kept = width * storage.matmul * min(copies, len(plain))
    if len(plain) < len(readers):
        kept += width
    return kept


def head_bytes(config: DecoderConfig, num_tokens: int, storage: Storage) -> int:
    """Bytes that final norm and loss keep for backward: FP32 input and normalised input, and both finished gradients of
    the head (`ops.loss`: for x in the matmuls' format, for the weight in FP32)."""
    norm = num_tokens * (2 * FP32 * config.dim + FP32)
    return norm + num_tokens * config.dim * storage.matmul + config.vocab_size * config.dim * FP32


def work_per_token(config: DecoderConfig, matmul: int, stream: int) -> float:
    """Activation bytes a token that backward of an eager dense layer has alive beyond what the layer keeps.

    What traces say (tests/planner/test_classes.py): the gradients around SwiGLU, which is computed in FP32, and that of
    the layer's output; where the MLP is thin, attention's.

    Args:
        config: of the decoder.
        matmul: bytes of a number in the matmuls.
        stream: bytes of a number in the residual stream.
    """
    around_mlp = (10 if matmul == 2 else 8) * config.ffn_dim + stream * config.dim
    return max(around_mlp, 12.0 * config.dim)


def _latent(config: DecoderConfig) -> int:
    return config.kv_lora_rank + config.qk_rope_head_dim


def _kv_width(config: DecoderConfig) -> int:
    """Width of keys, and of values, of a GQA layer, in activation bytes."""
    return config.num_kv_heads * config.head_dim


def _matmuls_kept(config: DecoderConfig, moe: bool, storage: Storage) -> int:
    """Bytes that selective checkpointing keeps: outputs of matmuls, and of attention with its log-sum-exp."""
    elements = _projections_kept(config) if config.num_heads else 0
    if not config.ffn_dim:
        return storage.matmul * (elements - config.dim * storage.compiled)
    if moe:
        shared = 2 * config.shared_width + (config.dim if config.num_shared_experts else 0)
        elements += config.num_experts_per_token * (2 * config.expert_dim + config.dim) + shared
        return storage.matmul * elements + FP32 * config.num_experts
    # A compiled layer sees that backward does not need the last matmul's output, nor does it above.
    elements += 2 * config.ffn_dim + (0 if storage.compiled else config.dim)
    return storage.matmul * elements


def _projections_kept(config: DecoderConfig) -> int:
    """Features in activation bytes that all of attention's projections give."""
    heads = config.num_heads * config.qk_head_dim
    if config.attention == "linear":
        return 4 * heads + 2 * config.num_heads + config.dim
    if config.attention == "gqa":
        return heads + 2 * _kv_width(config) + config.dim
    expanded = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return config.q_lora_rank + heads + _latent(config) + expanded + config.dim


def _attention_kept(config: DecoderConfig, storage: Storage) -> int:
    """Bytes that attention keeps: its output, which is as wide as its queries, and its log-sum-exp, which linear
    attention lacks."""
    sums = 0 if config.attention == "linear" else FP32 * config.num_heads
    return storage.matmul * config.num_heads * config.qk_head_dim + sums


def _norm_none(config: DecoderConfig, storage: Storage, *readers: str) -> int:
    """Activation bytes of a norm over the stream and the copies of its output that matmuls keep."""
    if storage.fused.issuperset(readers):
        codes = config.dim // (storage.slices if storage.cut_codes else 1)
        return config.dim * storage.stream // storage.slices + codes
    source = storage.stream if storage.compiled else 2 * FP32
    return (config.dim * source + FP32) // storage.slices + _kept_input(storage, config.dim, *readers)


def _inner_norm(width: int, source: int, storage: Storage, reader: str) -> int:
    """Activation bytes of MLA's norm over a compressed vector that is in a tensor of `source` elements."""
    result = _kept_input(storage, width, reader)
    if storage.compiled or reader in storage.fused:
        return storage.matmul * source + result + (0 if reader in storage.fused else FP32)
    kept = FP32 * source if storage.matmul == FP32 else FP32 * width
    return kept + width * FP32 + result + FP32


def _linear_none(config: DecoderConfig, storage: Storage) -> int:
    """Bytes that linear attention keeps: its inputs, and those of the norm of each head and the gate behind it."""
    width = config.num_heads * config.head_dim
    norm = _norm_none(config, storage, "q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")
    head_norm = width * (storage.matmul if storage.compiled else 2 * FP32) + FP32 * config.num_heads
    return norm + storage.matmul * (3 * width + 2 * config.num_heads) + head_norm + _swiglu(width, storage, "o_proj")


def _attention_none(config: DecoderConfig, storage: Storage) -> int:
    if config.attention == "linear":
        return _linear_none(config, storage)
    heads = config.num_heads * config.qk_head_dim
    statistics = FP32 * config.num_heads
    values = config.num_heads * config.value_head_dim
    out_qdata = values if "o_proj" in storage.qdata else 0
    if config.attention == "gqa":
        norm = _norm_none(config, storage, "q_proj", "k_proj", "v_proj")
        keys_values = 2 * (heads if storage.compiled else _kv_width(config))
        return norm + storage.matmul * (2 * heads + keys_values) + out_qdata + statistics
    norm = _norm_none(config, storage, "q_a_proj" if config.q_lora_rank else "q_proj", "kv_a_proj_with_mqa")
    inner = _inner_norm(config.kv_lora_rank, _latent(config), storage, "kv_b_proj")
    if config.q_lora_rank:
        inner += _inner_norm(config.q_lora_rank, config.q_lora_rank, storage, "q_b_proj")
    # Values are padded to the keys' width, so what the output projection reads is a copy of attention's result.
    padded = values if config.v_head_dim < config.qk_head_dim and not out_qdata else 0
    return norm + inner + storage.matmul * (4 * heads + padded) + out_qdata + statistics


def _swiglu(width: int, storage: Storage, reader: str) -> int:
    """Bytes that SwiGLU keeps: gate, up and their product; eager also silu(gate), and the first three in FP32."""
    narrow = storage.compiled or reader in storage.fused
    return width * (2 * storage.matmul if narrow else 3 * FP32) + _kept_input(storage, width, reader)


def _dense_none(config: DecoderConfig, storage: Storage) -> int:
    swiglu = _swiglu(config.ffn_dim, storage, "down_proj")
    norm = _norm_none(config, storage, "gate_proj", "up_proj")
    if storage.compiled and config.num_heads:  # the stream in the middle is rebuilt from input and attention's output
        norm += config.dim * (storage.matmul - storage.stream)
    return norm + swiglu


def _moe_none(config: DecoderConfig, storage: Storage) -> int:
    dim, chosen = config.dim, config.num_experts_per_token
    norm = (dim * (storage.stream if storage.compiled else 2 * FP32) + FP32) // storage.slices
    router = (dim * FP32 + FP32 * (config.num_experts + 1)) // storage.slices + chosen * (3 * _INT64 + 2 * FP32)
    rows = dim * storage.matmul + _kept_input(storage, dim, "experts.gate_proj", "experts.up_proj")
    rows += _swiglu(config.expert_dim, storage, "experts.down_proj")
    shared = 0
    if config.num_shared_experts:
        width = config.shared_width
        same = storage.stream == storage.matmul == FP32 and storage.slices == 1  # it is the router's input too
        shared = 0 if same else _kept_input(storage, dim, "shared_experts.gate_proj", "shared_experts.up_proj")
        shared += _swiglu(width, storage, "shared_experts.down_proj")
    return norm + router + chosen * rows + shared
