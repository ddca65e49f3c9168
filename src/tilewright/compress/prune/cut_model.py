"""A model without some of its units: made from the smaller shape, with the rows and columns of the units that stay.

No module is changed in place, so nothing can be left over of the old shape: the result is what its own config.json
would build, dense, and every trainer, export and `from_pretrained` takes it. That tensors are cut where they should be
is not believed but tried, on two short rows: the losses must be those of the model with the same units set to zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compress.prune.unit_kinds import Kind
from tilewright.compress.prune.unit_places import ROUTER_BIAS, Place, Share, UnitGroup, stored
from tilewright.core.errors import ConfigError
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.build import decoder_shapes, materialize
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.hf.load import load_hf

_CLOSE = 256
"""Of the machine's epsilon: relative difference of losses that is rounding. A unit that is cut in the wrong place
changes losses by a thousandth or more."""
_SHORT = 16
"""Positions of a short row, where a model knows so many."""
_NEVER = -1e4
"""Bias of an expert that is never chosen: scores are between 0 and 1."""

Kept = Mapping[Place, Tensor]
"""Units that stay at each place, in ascending order, as many at each."""


class LayoutError(ConfigError):
    """Units of a kind cannot be cut in a model, whose other kinds may be."""


@torch.no_grad()
def cut(model: Any, units: UnitGroup, kept: Kept) -> Any:
    """Cut a model: make a new one with these units alone.

    Args:
        model: a `models.base.protocols.Model` on the host, FP32 or FP64.
        units: of `find_units`.
        kept: int64, of each place of `units`.

    Returns:
        A model of the same class, mode and dtypes; it shares no memory with the old one.

    Raises:
        LayoutError: the smaller shape asks for other tensors than the units that stay have.
    """
    sizes = {len(numbers) / units.parts.get(place, 1) for place, numbers in kept.items()}
    if len(sizes) != 1 or kept.keys() != set(units.places):
        raise AssertionError("as many units stay at each place")
    numbers = kept[()].tolist() if units.kind == "layers" else range(int(sizes.pop()))
    made = _made(model, units.count.fewer(numbers))
    own = stored(model)
    shares: dict[str, list[tuple[Place, Share]]] = {}
    for place, all_of in units.shares.items():
        for share in all_of:
            shares.setdefault(share.tensor, []).append((place, share))
    for name, target in stored(made).items():
        source = _old_name(name, units, kept)
        if source not in own:
            raise _not_alike(units.kind, f"{name} would be {source}, which is not there")
        value = own[source]
        for place, share in shares.get(source, ()):
            value = value.index_select(share.dim, share.index(kept[place], units.size(place)).to(value.device))
        if value.shape != target.shape:
            here = f"{source} is {list(value.shape)}, {name} of the smaller model {list(target.shape)}"
            raise _not_alike(units.kind, here)
        target.data = value.detach().clone()
    _same_dtypes(model, made)
    made.tie_weights()
    return made.train(model.training)


def _not_alike(kind: Kind, got: str) -> LayoutError:
    return LayoutError(
        f"Units of kind {kind} are not interchangeable in this model",
        got=got,
        need="units that work at any position, as layers that are all alike",
        try_="other kinds of unit; this one stays whole",
    )


def _made(model: Any, config: Any) -> Any:
    if isinstance(config, DecoderConfig):
        made = decoder_shapes(config, model.kernels)
        materialize(made, "cpu")
        return made
    made = load_hf(config, model.task, kernels=model.kernels)
    if model.config._attn_implementation is not None:  # transformers stores neither
        made.net.set_attn_implementation(model.config._attn_implementation)
    if model.config._experts_implementation is not None:
        made.net.set_experts_implementation(model.config._experts_implementation)
    return made


def _old_name(name: str, units: UnitGroup, kept: Kept) -> str:
    for place, listed in units.listed.items():
        if name.startswith(f"{listed}."):
            number, dot, rest = name[len(listed) + 1 :].partition(".")
            return f"{listed}.{int(kept[place][int(number)])}{dot}{rest}"
    return name


def _same_dtypes(model: nn.Module, made: nn.Module) -> None:
    """Give buffers of a cut model that are computed, not stored, the precision that the old model has them in."""
    before = dict(model.named_buffers())
    for name, buffer in made.named_buffers():
        if name in before and before[name].dtype != buffer.dtype:
            buffer.data = buffer.data.to(before[name].dtype)


@torch.no_grad()
def difference(model: Any, units: UnitGroup, kept: Kept, made: Any) -> float:
    """How far the cut model is from the old one with the same units set to zero: largest difference of the losses of
    two short rows, as a share of their mean.

    Args:
        model, units, kept, made: see `cut`, and its result.

    Raises:
        LayoutError: the cut model cannot run: a layer of it has a width that does not follow the number of units.
    """
    batch = short_batch(model)
    try:
        with evaluation(made):
            found = _losses(made, batch)
    except RuntimeError as error:
        raise LayoutError(
            f"Model with fewer {units.kind} does not run",
            got=" ".join(str(error).split()).rstrip("."),
            need="layers whose widths all follow the number of units",
            try_="other kinds of unit; this one stays whole",
        ) from error
    with evaluation(model), _without(model, units, kept):
        expected = _losses(model, batch)
    scale = expected.abs().mean().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((found - expected).abs().max() / scale)


def limit(model: nn.Module, kind: Kind) -> float:
    """The difference up to which a cut is exact, in the model's precision; routers compute in FP32 in any model."""
    dtype = torch.float32 if kind == "experts" else next(model.parameters()).dtype
    return _CLOSE * torch.finfo(dtype).eps


def short_batch(model: Any) -> dict[str, Tensor]:
    """Two short rows of what a model learns from, to check a cut."""
    if hasattr(model, "short_batch"):
        return model.short_batch()
    generator = torch.Generator().manual_seed(0)
    length = min(_SHORT, model.max_positions or _SHORT)
    ids_BS = torch.randint(model.config.vocab_size, (2, length + 1), generator=generator)
    return {"input_ids": ids_BS[:, :-1].contiguous(), "labels": ids_BS[:, 1:].contiguous()}


@torch.no_grad()
def losses_of(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Losses of all targets, in evaluation mode, FP64, to check a cut."""
    with evaluation(model):
        return torch.cat([_losses(model, batch) for batch in batches])


def _losses(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    out = model.loss(batch)
    return (out.loss_sum[None] if out.each is None else out.each).double().flatten()


@contextmanager
def _without(model: nn.Module, units: UnitGroup, kept: Kept) -> Iterator[None]:
    """The model before a cut with the dropped units at zero; layers are left out, and experts never chosen."""
    if units.kind == "layers":
        (listed,) = units.listed.values()
        with _fewer_layers(model, listed, kept[()]):
            yield
        return
    own = stored(model)
    saved: list[tuple[Tensor, Tensor]] = []
    try:
        for place, shares in units.shares.items():
            count = units.size(place)
            dropped = torch.tensor(sorted(set(range(count)) - set(kept[place].tolist())), dtype=torch.int64)
            for share in shares:
                tensor = own[share.tensor].data
                saved.append((tensor, tensor.clone()))
                never = share.tensor.endswith(ROUTER_BIAS)
                if units.kind != "experts" or never:
                    tensor.index_fill_(share.dim, share.index(dropped, count), _NEVER if never else 0.0)
        yield
    finally:
        for tensor, before in reversed(saved):  # a convolution's weight is there twice: by its inputs and its outputs
            tensor.copy_(before)


@contextmanager
def _fewer_layers(model: nn.Module, listed: str, numbers: Tensor) -> Iterator[None]:
    parent, _, name = listed.rpartition(".")
    owner = model.get_submodule(parent)
    before = owner._modules[name]
    assert isinstance(before, nn.ModuleList)
    owner._modules[name] = nn.ModuleList(before[int(number)] for number in numbers)
    try:
        yield
    finally:
        owner._modules[name] = before
