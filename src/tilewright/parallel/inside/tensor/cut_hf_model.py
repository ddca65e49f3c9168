"""A Hugging Face model of which a rank holds a part of each matrix, by the plan that transformers has for it.

    cut_foreign(model, world)    # on meta: parameters are DTensors over `tp`, under their names in the whole model

A plan (`tp_plan`) names a style for each module that is cut. What a style means is done here with hooks and the
exchanges of `collectives`, so layers of any format compute on plain tensors and `forward` is never replaced: formats
move, evaluation is in FP32, and layers are recomputed as in a model that is whole. Experts that are stacked are not cut
but get some of the tokens of each rank, as in tilewright's own decoder; their styles in the plan are not used.

See: transformers, `distributed.tensor_parallel`, whose styles put DTensors through the layers and replace `forward`.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.models.hf.model import HFModel
from tilewright.parallel.inside.experts.stacked import TAKES, stacked_experts
from tilewright.parallel.inside.tensor.collectives import TensorRanks
from tilewright.parallel.inside.tensor.matrix_cuts import check_codes, cuts_vocabulary, uneven_rows
from tilewright.parallel.inside.tensor.parameter_parts import (
    Cut,
    adapter_on_all,
    keep_parts,
    on_part,
    part_along,
    run_on_parts,
    shape_along,
)
from tilewright.parallel.inside.tensor.sequence_slices import mark_partial
from tilewright.parallel.inside.tensor.shape_ranks import ShapeRanks
from tilewright.parallel.inside.tensor.vocabulary import HeadPart, cut_embedding
from tilewright.parallel.pipeline.hf_stages import StagedHF
from tilewright.parallel.world import World

QUERIES, KEYS = ("q_proj", "q_b_proj", "kv_b_proj"), ("k_proj", "v_proj")
"""Layers whose outputs are heads, as transformers' plans name them."""


@dataclass(frozen=True)
class _Cut:
    """The settings with which the styles are put into practice."""

    model: HFModel
    ranks: TensorRanks
    part: Cut
    """This rank's part of a parameter along a dim."""
    shards: int
    """Ranks along `dp_shard`, which cut the rows of what is left."""
    modules: frozenset[nn.Module]
    """Those that the plan names."""
    made: dict[Tensor, Tensor] = field(default_factory=dict)
    """Parts by whole parameter: tied ones stay tied."""
    inputs: dict[nn.Module, "_OneSpread"] = field(default_factory=dict)
    """What layers side by side read, by the module around them."""

    def keep(self, module: nn.Module, dims: Mapping[str, int], *, hidden: tuple[str, ...] = ()) -> None:
        """Keep this rank's part of the parameters of a Hugging Face module, and let it compute on them.

        Args:
            module: of the parameters.
            dims: along which each is cut, by name.
            hidden: parameters that the module computes without.
        """
        keep_parts(module, dims, self.part, self.made)
        mark_partial(module, self.ranks, adapter_on_all(module, dims["weight"]))
        run_on_parts(module, hidden)

    def spread(self, module: nn.Module) -> Callable[[Tensor], Any]:
        """The function that spreads the input of a cut Hugging Face module: with the modules beside it that read the
        same one."""
        parent = next(one for one in self.model.net.modules() if any(child is module for child in one.children()))
        if parent not in self.inputs:
            self.inputs[parent] = _OneSpread(self.ranks)
            parent.register_forward_hook(self.inputs[parent].forget, always_call=True)
        return self.inputs[parent]


def cut_foreign(model: HFModel, world: World) -> None:
    """Cut the matrices of a Hugging Face model over the ranks of `tp`, in place.

    Args:
        model: converted, on meta, or with memory in tests: its parameters are new objects. Of a pipeline this rank's
            stages, whose other layers and ends are not there.
        world: with `tp` ranks that hold other parts.

    Raises:
        ConfigError: it has no plan, or one with a style that is not known here; heads or widths do not come out even;
            FP8 weights cannot be cut between their scales.
    """
    assert world.mesh is not None, "tp > 1 has a mesh"
    part = functools.partial(part_along, world.mesh["tp"])
    _cut(model, TensorRanks.of(world), part, world.sizes.dp_shard)
    model.notes.append(
        "Matrices of a Hugging Face model are cut without slices of the sequence: norms run on all positions."
    )


def cut_shapes(model: HFModel, tp: int, shards: int) -> None:
    """Give a Hugging Face model the shapes of what the first of `tp` ranks has, in place: its layers compute on them,
    and exchange nothing. For plans.

    Args:
        model: on meta; its parameters are new objects, plain ones.
        tp, shards: ranks along `tp` and `dp_shard`.

    Raises:
        ConfigError: see `cut_foreign`.
    """
    _cut(model, ShapeRanks.of_size(tp), functools.partial(shape_along, tp), shards)


def _cut(model: HFModel, ranks: TensorRanks, part: Cut, shards: int) -> None:
    styles = check_foreign(model, ranks.size, shards)  # before anything is cut
    cut = _Cut(model, ranks, part, shards, frozenset(module for _, module, _ in styles))
    elsewhere = model.elsewhere if isinstance(model, StagedHF) else ()
    for _, module, style in styles:
        if module not in elsewhere:
            STYLES[style](module, cut)
    for _, module in stacked_experts(model.net):
        _each_some_tokens(module, ranks)


def check_foreign(model: HFModel, tp: int, shards: int) -> list[tuple[str, nn.Module, str]]:
    """Check the names of a Hugging Face model's plan of cuts, see `planned`.

    Args:
        model: whole, or some of its layers.
        tp, shards: ranks along `tp` and `dp_shard`.

    Raises:
        ConfigError: see `cut_foreign`.
    """
    styles = list(planned(model))
    if not styles:
        raise ConfigError(
            "Model that transformers has no plan of tensor parallelism for",
            got=f"{type(model.net).__name__}, parallel.tp = {tp}",
            need="a model with a `tp_plan`, as those of the Llama, Qwen and DeepSeek kind, or tilewright's own decoder",
            try_="--parallel.tp 1: shards (FSDP2) take any model",
            where="parallel.tp",
        )
    for name, module, style in styles:
        _check(model, name, module, style, tp, shards)
    return styles


def planned(model: HFModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules that the plan of a Hugging Face model cuts, with their names in the network and their styles; without
    stacked experts."""
    plan: Mapping[str, str] = getattr(model.net, "tp_plan", None) or {}
    experts = [f"{name}." for name, _ in stacked_experts(model.net)]
    for name, module in model.net.named_modules():
        if any(f"{name}.".startswith(inside) for inside in experts):
            continue
        if (style := plan.get(_by_kind(name))) is not None:
            yield name, module, style
        for own in module._parameters:
            full = f"{name}.{own}"
            if (style := plan.get(_by_kind(full))) is not None and style != "replicate":
                yield full, module, f"{style} of a parameter"


def _by_kind(name: str) -> str:
    """A name of a Hugging Face module with `*` for the numbers of layers, as plans of cuts have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


# ---- what styles mean ----


def _outputs(module: nn.Module, cut: _Cut) -> None:
    """Cut a Hugging Face module by its outputs: all ranks have the input, and each computes some outputs."""
    cut.keep(module, {"weight": 0, "bias": 0})
    _before(module, cut.spread(module))


def _outputs_joined(module: nn.Module, cut: _Cut) -> None:
    """Cut a Hugging Face module's outputs, and all ranks get all of them."""
    if module is not cut.model.head:
        _outputs(module, cut)
        _behind(module, cut.ranks.gathered)
    elif _cuts_rows(module, cut):
        cut.keep(module, {"weight": 0})
        HeadPart.of(module, cut.ranks, on_part)  # type: ignore[arg-type]


def _inputs(module: nn.Module, cut: _Cut) -> None:
    """Cut a Hugging Face module by its inputs: the ranks' results are summed, and the bias is added once."""
    cut.keep(module, {"weight": 1}, hidden=("bias",))

    def joined(out: Tensor) -> Tensor:
        out, bias = cut.ranks.joined(out), module._parameters.get("bias")
        return out if bias is None else out + bias.to(out.dtype)

    _behind(module, joined)


def _inputs_split(module: nn.Module, cut: _Cut) -> None:
    """Cut a Hugging Face module's inputs, of an input that all ranks have whole."""
    _inputs(module, cut)
    _before(module, cut.ranks.own_columns)


def _rows(module: nn.Module, cut: _Cut) -> None:
    """Cut the rows of a Hugging Face embedding."""
    if _cuts_rows(module, cut):
        cut.keep(module, {"weight": 0})
        cut_embedding(module, cut.ranks)  # type: ignore[arg-type]


def _partial(module: nn.Module, cut: _Cut) -> None:
    """Mark parameters of a Hugging Face model whose gradient on a rank comes from that rank's heads alone. It is summed
    once per step, see `sequence_slices.sum_of_slices`."""
    mark_partial(module, cut.ranks, [name for name, _ in module.named_parameters()])


def _latent(module: nn.Module, cut: _Cut) -> None:
    """Cut latent attention of a Hugging Face model; its last columns are a key that all heads share."""
    shared = cut.model.config.get_text_config().qk_rope_head_dim

    def behind(out: Tensor) -> Tensor:
        latent, key = out.split([out.shape[-1] - shared, shared], -1)
        return torch.cat([latent, cut.ranks.spread(key)], -1)

    _behind(module, behind)


STYLES: dict[str, Callable[[nn.Module, _Cut], None]] = {
    "colwise": _outputs,
    "colwise_gather_output": _outputs_joined,
    "colwise_rep": _outputs_joined,
    "rowwise": _inputs,
    "rowwise_rep": _inputs_split,
    "rowwise_split_input": _inputs_split,
    "embedding_rowwise": _rows,
    "replicated_with_grad_allreduce": _partial,
    "mla_kv_a_proj": _latent,
    "all_reduce": lambda module, cut: _behind(module, cut.ranks.joined),
    "replicate": lambda module, cut: None,
}
"""By transformers' names."""
_ROWS, _COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep"), ("rowwise", "rowwise_rep", "rowwise_split_input")


def _check(model: HFModel, name: str, module: nn.Module, style: str, tp: int, shards: int) -> None:
    """Check the cuts of a Hugging Face model: raise ConfigError where a style is not known, or a module does not come
    out even."""
    linear = style in (*_ROWS, *_COLUMNS)
    if style not in STYLES or (linear and not isinstance(module, nn.Linear)):
        what = style if style not in STYLES else f"{style} of {type(module).__name__}"
        raise ConfigError(
            "Style of tensor parallelism that is not known",
            got=f"{what} for {name} in the plan of {type(model.net).__name__}",
            need=f"of linear layers, embeddings and norms: {', '.join(STYLES)}",
            try_="--parallel.tp 1: shards (FSDP2) take any model",
            where="parallel.tp",
        )
    if not linear or module is model.head:  # a head that does not come out even stays whole
        return
    assert isinstance(module, nn.Linear), "as was looked at"
    last, config = name.rpartition(".")[2], model.config.get_text_config()
    queries = getattr(config, "num_attention_heads", 0)
    heads = queries if last in QUERIES else (getattr(config, "num_key_value_heads", 0) or queries) * (last in KEYS)
    if heads % tp:
        raise ConfigError(
            "Heads that cannot be cut over the processes evenly",
            got=f"{heads} heads of {name}, parallel.tp = {tp}",
            need=f"a tp that divides {heads}",
            try_=f"--parallel.tp {max(size for size in range(1, tp) if heads % size == 0)}",
            where="parallel.tp",
        )
    if style in _ROWS:
        uneven_rows(name, module.out_features, tp, shards)
    elif module.in_features % tp:
        uneven_rows(name, module.in_features, tp, 1)
    check_codes(name, module, 0 if style in _ROWS else 1, tp)


def _cuts_rows(module: nn.Module, cut: _Cut) -> bool:
    """True if an embedding or head can be cut by rows of the vocabulary. The rows divide evenly, none is a padding
    token's (torch leaves out its gradient by its number), the head has no bias, and both ends are in the plan where
    they are tied."""
    head, table = cut.model.head, cut.model.table
    weight: Any = module.weight
    padded = any(getattr(part, "padding_idx", None) is not None for part in (module, table))
    plain = isinstance(head, nn.Linear) and head.bias is None and not padded
    tied = plain and head is not None and head.weight is table.weight
    both = not tied or {head, table} <= cut.modules
    if plain and both and cuts_vocabulary(len(weight), cut.ranks.size, cut.shards):
        return True
    note = (
        f"Embedding and head are whole on each process of parallel.tp: {len(weight)} rows do not come out even over tp "
        f"x dp_shard = {cut.ranks.size * cut.shards}, or the plan of transformers and the model say no."
    )
    if note not in cut.model.notes:
        cut.model.notes.append(note)
    return False


# ---- hooks ----


class _OneSpread:
    """Spreads what several layers read once, so that their gradients are added up before ranks exchange them.

    Args:
        ranks: hold other parts of the layers.
    """

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._last: tuple[Any, Any] | None = None

    def __call__(self, x: Any) -> Any:
        """The input of cut Hugging Face layers, spread once: the same object for each layer."""
        if self._last is None or self._last[0] is not x:
            self._last = x, self._ranks.spread(x)
        return self._last[1]

    def forget(self, *_: Any) -> None:
        """Forget the input that was spread for cut Hugging Face layers, at the end of what is around them."""
        self._last = None


def _before(module: nn.Module, change: Callable[[Any], Any]) -> None:
    module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))


def _behind(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def changed(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return change(out)

    module.register_forward_hook(changed)


def _each_some_tokens(module: nn.Module, ranks: TensorRanks) -> None:
    """Send a share of the tokens of each rank through stacked experts, which a cut Hugging Face model keeps whole, and
    give all ranks the output."""
    calls: list[tuple[int, tuple[Tensor, ...]]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x_ND, experts_NK, weights_NK = (*args, *(kwargs[name] for name in TAKES[len(args) :]))
        rows = ranks.rows_of(len(x_ND))
        own = ranks.own_rows(x_ND), ranks.own_rows(weights_NK)
        calls.append((len(x_ND), own))
        return (own[0], experts_NK[rows.start : rows.stop], own[1]), {}

    def behind(_: nn.Module, __: Any, ___: Any, out: Tensor | None) -> Tensor | None:
        num_rows, own = calls.pop()
        if out is None:  # the module has raised
            return None
        if not len(out):  # all ranks exchange the gradient of what they were given
            out = out + sum(part.sum().to(out.dtype) for part in own)
        return ranks.all_rows(out, num_rows)

    module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)  # rows are sent to experts afterwards
    module.register_forward_hook(behind, with_kwargs=True, always_call=True)
