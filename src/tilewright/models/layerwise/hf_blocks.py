"""Where a foreign model has its blocks: the largest `nn.ModuleList` whose members a forward pass calls once each, in
order, each reading what the one before gave."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tilewright.models.base.stand_ins import stand_ins
from tilewright.models.hf.model import HFModel
from tilewright.models.layerwise.layer_calls import LayerCall, tensors_of


class NotSliceableError(Exception):
    """Why a model is kept whole."""


@dataclass(frozen=True)
class CallSite:
    """Where the blocks are, and how the stream goes through one."""

    parent: nn.Module
    name: str
    slot: int | str = 0
    """Position or name of the stream among a block's arguments."""
    tuple_of: int = 0
    """A block's output is a tuple of so many items, of which the first is the stream. 0: it is the stream."""

    @property
    def blocks(self) -> nn.ModuleList:
        return getattr(self.parent, self.name)

    def stream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return args[self.slot] if isinstance(self.slot, int) else kwargs[self.slot]

    def pack(self, x: Tensor) -> Any:
        return (x, *[None] * (self.tuple_of - 1)) if self.tuple_of else x

    def unpack(self, out: Any) -> Tensor:
        return out[0] if self.tuple_of else out


def find_blocks(model: HFModel, batch: Mapping[str, Tensor]) -> CallSite:
    lists = [
        CallSite(parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child)
    ]
    sizes = {id(place): sum(p.numel() for p in place.blocks.parameters()) for place in lists}
    reasons = []
    for place in sorted(lists, key=lambda place: -sizes[id(place)]):
        try:
            return _follow(model, place, batch)
        except NotSliceableError as reason:
            reasons.append(f"{place.name}: {reason}")
    raise NotSliceableError("; ".join(reasons[:3]) or "it has no list of blocks")


@dataclass
class _Seen:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    out: Any = None


def _follow(model: HFModel, place: CallSite, batch: Mapping[str, Tensor]) -> CallSite:
    """Follow the stream through a Hugging Face model's blocks as it runs.

    Raises:
        NotSliceableError: it is not one stream through each block once.
    """
    seen: list[tuple[int, _Seen]] = []
    blocks = list(place.blocks)

    def visit(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Seen(args, dict(kwargs))
        seen.append((index, call))
        call.out = blocks[index](*args, **kwargs)
        return call.out

    with stand_ins(place.parent, place.name, visit):
        model.loss(batch)
    if [index for index, _ in seen] != list(range(len(blocks))):
        raise NotSliceableError("its members are not called once each, in order")
    calls = [call for _, call in seen]
    tuple_of = len(calls[0].out) if isinstance(calls[0].out, tuple) else 0
    streams = [call.out[0] if tuple_of else call.out for call in calls]
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in streams):
        raise NotSliceableError("a block's output is no tensor")
    place = CallSite(place.parent, place.name, _slot(calls, streams), tuple_of)
    for call in calls:
        rest = LayerCall.seen(place.slot, call.args, call.kwargs)
        if any(t.requires_grad for t in tensors_of((rest.args, rest.kwargs))):
            raise NotSliceableError("a block reads a second tensor that needs a gradient")
    return place


def _slot(calls: list[_Seen], streams: list[Tensor]) -> int | str:
    """Find the argument in which a block of a Hugging Face model gets the stream of the one before."""
    if len(calls) == 1:
        slots = {key for key, value in [*enumerate(calls[0].args), *calls[0].kwargs.items()] if _asks(value)}
    else:
        slots = {key for key, value in [*enumerate(calls[1].args), *calls[1].kwargs.items()] if value is streams[0]}
    for slot in slots:
        given = [c.args[slot] if isinstance(slot, int) else c.kwargs.get(slot) for c in calls if _has(c, slot)]
        if len(given) == len(calls) and all(a is b for a, b in zip(given[1:], streams, strict=False)):
            return slot
    raise NotSliceableError("a block does not read what the one before gave")


def _asks(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _has(call: _Seen, slot: int | str) -> bool:
    return slot < len(call.args) if isinstance(slot, int) else slot in call.kwargs
