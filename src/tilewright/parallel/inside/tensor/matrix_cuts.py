"""Which matrices of a decoder are cut over ranks (`tp`), and along which dim; shapes alone, also on the meta device.

Attention is cut by heads: the outputs of what makes heads (dim 0 of the weight), the inputs of `o_proj` (dim 1). An MLP
is cut by its hidden width, and so are the shared experts of a mixture, embedding and head by vocabulary. All else is on
every rank: norms, routers, and what makes the vectors that all heads of latent attention share. Routed experts are
whole where they are: ranks send other tokens through them (`inside.experts`).

FSDP2 cuts the rows of what is left on a rank. A dim that both cut has to come out even: torch's metadata of what is
left over are wrong (pytorch#168134). Heads and hidden widths that do not are refused, a vocabulary stays whole.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import cast

from torch import Tensor, nn

from tilewright.core.config.model_conflicts import Conflict
from tilewright.core.config.sections.tensor_conflicts import uneven_widths
from tilewright.core.errors import ConfigError
from tilewright.formats.scaling import BLOCK_TILE
from tilewright.models.decoder.config import DecoderConfig, LayerShape
from tilewright.models.decoder.decoder import Decoder
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear

OUTPUTS = ("q_proj", "q_b_proj", "k_proj", "v_proj", "kv_b_proj", "gate_proj", "up_proj")
INPUTS = ("o_proj", "down_proj")


def cut_dims(model: Decoder, tp: int, dp_shard: int) -> dict[nn.Module, int]:
    """The modules whose weight is cut over `tp` ranks, with the dim.

    Args:
        model: whose shapes are read.
        tp, dp_shard: ranks along these axes.
    """
    found: dict[nn.Module, int] = {}
    if cuts_vocabulary(model.config.vocab_size, tp, dp_shard):
        found |= dict.fromkeys(held_ends(model), 0)
    for name, module in cut_modules(model):
        last = name.rpartition(".")[2]
        if last in OUTPUTS or last in INPUTS:
            found[module] = 0 if last in OUTPUTS else 1
    return found


def cut_modules(model: Decoder) -> list[tuple[str, nn.Module]]:
    """Modules with cuts by name, without those of routed experts, which are whole where they are."""
    return [(name, module) for name, module in model.named_modules() if ".experts." not in name]


def held_ends(model: Decoder) -> list[nn.Embedding | nn.Linear]:
    """Embedding and head for the cuts, where this rank has them: other stages of a pipeline have neither."""
    return [end for end in (model.model.embed_tokens, model.lm_head) if isinstance(end, nn.Embedding | nn.Linear)]


def cuts_vocabulary(vocab_size: int, tp: int, dp_shard: int) -> bool:
    """True if the cuts include the vocabulary: rows of embedding and head come out even over both axes.

    Example:
        >>> cuts_vocabulary(512, 2, 2), cuts_vocabulary(50257, 2, 1)
        (True, False)
    """
    return vocab_size % (tp * dp_shard) == 0


def config_on_rank(config: DecoderConfig, tp: int, dp_shard: int) -> DecoderConfig:
    """The shape after the cuts of what one of `tp` ranks has: a decoder with fewer heads, narrower MLPs, fewer tokens.

    Example:
        >>> found = config_on_rank(DecoderConfig.of(vocab_size=512, dim=64, num_heads=8, ffn_dim=192), 4, 1)
        >>> found.num_heads, found.head_dim, found.ffn_dim, found.vocab_size
        (2, 8, 48, 128)
    """
    vocab = config.vocab_size // tp if cuts_vocabulary(config.vocab_size, tp, dp_shard) else config.vocab_size
    cut = [_on_rank(config.at(layer), tp) for layer in range(len(config.layers))]
    return replace(config, vocab_size=vocab, layers=tuple(cut), **asdict(_on_rank(config, tp)))


def _on_rank(config: DecoderConfig, tp: int) -> LayerShape:
    """The part of a layer that one of the ranks has after the cuts."""
    heads, kv_heads = config.num_heads // tp, config.num_kv_heads // tp
    shared = config.shared_width // tp if config.num_experts else 0
    return replace(
        config.shape, num_heads=heads, num_kv_heads=kv_heads, ffn_dim=config.ffn_dim // tp, shared_dim=shared
    )


def check_cuts(model: nn.Module, tp: int, dp_shard: int) -> None:
    """Check the cuts: raise where a model cannot be cut so.

    Raises:
        ConfigError: it is not tilewright's own decoder, its heads or widths do not come out even, or FP8 weights
            cannot be cut between their scales.
    """
    if not isinstance(model, Decoder) or not isinstance(model.architecture, str):
        raise ConfigError(
            "Model whose matrices cannot be cut over processes yet",
            got=f"{type(model).__name__}, parallel.tp = {tp}",
            need="tilewright's own decoder, or a Hugging Face model that transformers has a plan for",
            try_="--parallel.tp 1: shards (FSDP2) take any model",
            where="parallel.tp",
        )
    config = model.config
    if any(shape.attention == "linear" for shape in config.shapes):
        raise ConfigError(
            "Linear attention that cannot be cut over processes yet",
            got=f"linear attention, parallel.tp = {tp}",
            need="layers with softmax attention, or whole layers on each process",
            try_="--parallel.tp 1",
            where="parallel.tp",
        )
    for found in _uneven(config, tp):
        raise ConfigError(found.what, got=found.got, need=found.need, try_=found.try_, where="parallel.tp")
    for name, module in cut_modules(model):
        last = name.rpartition(".")[2]
        if last in OUTPUTS:
            uneven_rows(name, cast(Tensor, module.weight).shape[0], tp, dp_shard)
        if last in OUTPUTS or last in INPUTS:
            check_codes(name, module, 0 if last in OUTPUTS else 1, tp)


def _uneven(config: DecoderConfig, tp: int) -> Iterator[Conflict]:
    kinds = dict.fromkeys(config.at(layer) for layer in range(config.num_layers))
    for kind in kinds:
        groups = kind.num_kv_heads if config.attention == "gqa" else 0
        owner = "model.layers: " if config.layers else "model."
        yield from uneven_widths(kind.num_heads, groups, kind.ffn_dim, tp, kind.shared_width, owner=owner)


def check_codes(name: str, module: nn.Module, dim: int, tp: int) -> None:
    """Check codes before the cuts: raise ConfigError where a weight is FP8 codes, and a part of it would not have its
    scales for itself."""
    if not isinstance(module, FrozenFloat8Linear):
        return
    size, tile = module.weight.shape[dim], BLOCK_TILE.rows
    if size % (tp * tile):
        raise ConfigError(
            "FP8 weight that cannot be cut between its scales",
            got=f"{size} {('rows', 'columns')[dim]} of {name}, parallel.tp = {tp}",
            need=f"a multiple of {tile} x {tp}: a scale belongs to {tile} x {tile} values",
            try_="--lora.base keep, or --parallel.tp 1",
            where="parallel.tp",
        )


def uneven_rows(name: str, rows: int, tp: int, dp_shard: int) -> None:
    """Check rows before the cuts: raise ConfigError where what is cut over both axes does not come out even."""
    if rows % (tp * dp_shard):
        raise ConfigError(
            "Matrix that does not come out even over both axes",
            got=f"{rows} rows of {name}, parallel.tp = {tp}, parallel.dp_shard = {dp_shard}",
            need=f"rows that divide by tp x dp_shard = {tp * dp_shard}: shards are parts of what tp leaves",
            try_=f"--parallel.dp_shard 1 and --parallel.tp {tp}, or --parallel.tp 1",
            where="parallel.tp",
        )
