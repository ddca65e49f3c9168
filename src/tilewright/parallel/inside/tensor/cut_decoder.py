"""A decoder of which a rank holds a part of each matrix (tensor parallelism), under its name in the whole one.

    cut_tensors(model, world)    # on meta: parameters are DTensors over `tp`
    shard(model, ...)            # FSDP2 shards the rows of what is left on a rank

Parameters are DTensors for what stores and updates them: names, optimizer, checkpoints. Layers compute on the part that
is here, as plain tensors, whatever their format: a hook puts it in the weight's place while the layer runs. What ranks
tell each other is in hooks too, at the ends of attention and MLP; a layer that is recomputed runs them again.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.formats.scaling import ROW_TILE
from tilewright.formats.tiled import WithCopies
from tilewright.models.decoder.attention import GroupedQueryAttention, LatentAttention
from tilewright.models.decoder.layers import MLP
from tilewright.models.decoder.moe import MoE, RunTokens
from tilewright.models.hf.model import HFModel
from tilewright.parallel.inside.tensor.collectives import TensorRanks
from tilewright.parallel.inside.tensor.cut_hf_model import check_foreign, cut_foreign
from tilewright.parallel.inside.tensor.matrix_cuts import check_cuts, cut_dims, cut_modules, cuts_vocabulary, held_ends
from tilewright.parallel.inside.tensor.parameter_parts import (
    adapter_on_all,
    keep_parts,
    on_part,
    part_along,
    run_on_parts,
)
from tilewright.parallel.inside.tensor.sequence_slices import SequenceSlices, mark_partial
from tilewright.parallel.inside.tensor.vocabulary import HeadPart, cut_embedding
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.world import World
from tilewright.precision.float8.linear import Float8Linear

ATTENTION_OR_MLP = (GroupedQueryAttention, LatentAttention, MLP)
TILE = ROW_TILE.cols
"""Tokens that share a scale of a column."""


def check_tensors(model: Any, sizes: MeshSizes) -> None:
    """Check a decoder before it is cut over `tp` and in stages, on all ranks alike: each stage sees its own layers
    alone.

    Raises:
        ConfigError: see `cut_tensors`.
    """
    (check_foreign if isinstance(model, HFModel) else check_cuts)(model, sizes.tp, sizes.dp_shard)


def cut_tensors(model: Any, world: World, *, sequence_parallel: bool = False) -> None:
    """Cut the matrices of a decoder over the ranks of `tp`, in place, and let its layers run on their parts.

    Args:
        model: converted, on meta, or with memory in tests: its parameters are new objects. Of a pipeline this rank's
            stages, whose other layers and ends are not there.
        world: with `tp` ranks that hold other parts.
        sequence_parallel: each rank has some positions of the residual stream (`sequence_slices`); False: all of it. Of
            a Hugging Face model each has all.

    Raises:
        ConfigError: see `matrix_cuts.check_cuts`, and of a Hugging Face model `cut_hf_model.cut_foreign`.
    """
    sizes, ranks = world.sizes, TensorRanks.of(world)
    if isinstance(model, HFModel):
        cut_foreign(model, world)
        return
    check_cuts(model, sizes.tp, sizes.dp_shard)
    assert world.mesh is not None, "tp > 1 has a mesh"
    # 1. Parameters: parts under the whole one's names, tied ones once.
    made: dict[Tensor, Tensor] = {}
    part = functools.partial(part_along, world.mesh["tp"])
    for module, dim in cut_dims(model, sizes.tp, sizes.dp_shard).items():
        keep_parts(module, {"weight": dim}, part, made)
        mark_partial(module, ranks, adapter_on_all(module, dim))
        run_on_parts(module)
    # 2. What ranks exchange at the ends of attention and MLP: sums of whole streams, or slices of positions.
    slices = model.slices = SequenceSlices(ranks) if sequence_parallel else None
    for _, module in cut_modules(model):
        if isinstance(module, LatentAttention):
            for reader in (module.q_b_proj if module.q_lora_rank else module.q_proj, module.kv_b_proj):
                _spread_input(reader, ranks)
            module.shared_by_heads = ranks.spread
        if isinstance(module, MoE):
            module.divided, module.slices = None, slices
            if slices is None:
                module.divided = functools.partial(_each_some_tokens, ranks)
        elif isinstance(module, ATTENTION_OR_MLP) and slices is not None:
            _run_on_slices(module, slices)
        elif isinstance(module, GroupedQueryAttention | MLP):
            _spread_input(module, ranks)
        if isinstance(module, ATTENTION_OR_MLP) and slices is None:
            _join_output(module, ranks)
    # 3. Embedding and head by rows of the vocabulary, where these come out even.
    if cuts_vocabulary(model.config.vocab_size, sizes.tp, sizes.dp_shard):
        for end in held_ends(model):
            if isinstance(end, nn.Embedding):
                cut_embedding(end, ranks)
            else:
                HeadPart.of(end, ranks, on_part)
    else:
        model.notes.append(
            f"Embedding and head are whole on each process of parallel.tp: {model.config.vocab_size} rows do not come "
            f"out even over tp x dp_shard = {sizes.tp * sizes.dp_shard}."
        )


def _each_some_tokens(
    ranks: TensorRanks, run: RunTokens, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor
) -> Tensor:
    """Send a share of the tokens of each rank through the routed experts, which a cut decoder keeps whole, and give all
    ranks the output."""
    rows = ranks.rows_of(len(x_ND))
    token_n = torch.arange(rows.start, rows.stop, device=x_ND.device)
    out_nD = run(ranks.own_rows(x_ND), ranks.own_rows(weights_NK), experts_NK[rows.start : rows.stop], token_n)
    return ranks.all_rows(out_nD, len(x_ND))


def _run_on_slices(module: GroupedQueryAttention | LatentAttention | MLP, slices: SequenceSlices) -> None:
    """Run a layer of a cut decoder on slices: gather what attention or an MLP reads, and give slices of what it
    makes."""
    shapes: list[torch.Size] = []
    """Of the input of the call that runs."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, readers = args[0], module.readers()
        value, latent = x.value if isinstance(x, WithCopies) else x, isinstance(module, LatentAttention)
        if isinstance(module, MLP):
            shapes.append(value.shape)
            if reads_codes(module, x) and value.shape[:-1].numel() % TILE == 0:
                return slices.read_token_codes(x, len(readers)), *args[1:]
            return slices.read_tokens(value), *args[1:]
        slices.length = length = args[1].shape[1]
        if reads_codes(module, x) and length == value.shape[1] * slices.ranks.size and value.shape[1] % TILE == 0:
            return slices.read_codes(x, length, len(readers), whole_gradient=latent), *args[1:]
        return (slices.leave if latent else slices.read)(value, length), *args[1:]

    def after(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        if isinstance(module, MLP):
            shape = shapes.pop()
            return slices.written_tokens(out, shape).view(*shape[:-1], out.shape[-1])
        return slices.written(out)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def reads_codes(module: GroupedQueryAttention | LatentAttention | MLP, x: Tensor | WithCopies) -> bool:
    """True if all layers that read a module's input read its codes, forward and backward, in their present formats. An
    MLP in chunks takes the value, some tokens at a time, and so does an adapter."""
    if not isinstance(x, WithCopies) or getattr(module, "chunking", None) is not None:
        return False
    return all(
        isinstance(reader, Float8Linear)
        and reader.gemms.fprop.scaled
        and not reader.keep_value
        and "lora_A" not in reader._parameters
        for reader in module.readers()
    )


def _spread_input(module: nn.Module, ranks: TensorRanks) -> None:
    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return ranks.spread(args[0]), *args[1:]

    module.register_forward_pre_hook(before)


def _join_output(module: nn.Module, ranks: TensorRanks) -> None:
    def after(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return ranks.joined(out)

    module.register_forward_hook(after)
