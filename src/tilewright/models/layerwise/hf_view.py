"""Foreign models, layer by layer: their blocks are found, and their own forward does the rest.

The blocks are the largest `nn.ModuleList` whose members a forward pass calls once each, in order, each reading what the
one before gave. To run only what comes before them, or only what comes after, the model's own forward runs with
stand-ins in the list's place: they pass the stream on, note what else the layers are called with, and the last one ends
the prologue; for the epilogue they give out the stream as it left the last layer. So whatever a model does around its
blocks is done by its own code, in the precision regions that `precision.convert` put around it.

That a model may be cut so is not believed but tried, on two short rows: the loss and the gradient that reaches the
first layer must be those of the uncut model, and running it must change none of its buffers (as batch norms do). A
model that fails is kept whole, and its `notes` say why.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.base.eval_mode import eager
from tilewright.models.base.protocols import LayerContext, LossOutput
from tilewright.models.hf.model import HFModel
from tilewright.models.layerwise.calls import LayerCall, LayerCalls, tensors_of
from tilewright.models.layerwise.view import LayerwiseModel, SingleBlock

_CLOSE = 1e-4
"""Relative difference of losses and gradients that is rounding: a cut changes no operation, only where autocast's
copies of weights are made."""

Visit = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class _NotSliceable(Exception):
    """Why a model is kept whole."""


class _Reached(Exception):
    """Where the blocks begin: ends the forward pass of a prologue."""


class _StandIn(nn.Module):
    """In a layer's place: answers calls by `visit`, and all else as the layer would."""

    def __init__(self, index: int, layer: nn.Module, visit: Visit) -> None:
        super().__init__()
        self._index, self._visit = index, visit
        self._layer = (layer,)  # in a tuple, so that it is not registered

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("_layer")[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._visit(self._index, args, kwargs)


@dataclass(frozen=True)
class _CallSite:
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


class HFLayers:
    """A Hugging Face model as a `LayerwiseModel`. Made by `layered`."""

    def __init__(self, model: HFModel, place: _CallSite) -> None:
        self.model = model
        self._place = place
        self.blocks: Sequence[nn.Module] = place.blocks
        self.calls = LayerCalls()
        self._outer: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])

    def context(self, batch: Mapping[str, Tensor]) -> LayerContext:
        """What the layers are called with beside the stream. Parameters outside of the layers need no values."""
        devices = {param.device for param in self.model.parameters() if param.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(devices):
            return self.prologue(batch)[1]

    def prologue(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, LayerContext]:
        """The stream as it enters the first layer, and how each layer is called."""
        calls: list[LayerCall] = []
        streams: list[Tensor] = []

        def visit(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            streams.append(self._place.stream(args, kwargs))
            calls.append(LayerCall.seen(self._place.slot, args, kwargs))
            if index + 1 == len(self.blocks):
                raise _Reached
            return self._place.pack(streams[0])

        try:
            self._run(batch, visit)
        except _Reached:
            return streams[0], self.calls.pack(calls)
        raise AssertionError("the last layer was not reached, as it was when the blocks were found")

    def layer(self, index: int, x: Tensor, context: LayerContext) -> tuple[Tensor, None]:
        """One layer, called as its model calls it."""
        call = self.calls.call(index, context)
        enabled, dtype = call.autocast
        args, kwargs = call.arguments(self._place.slot, x)
        with torch.autocast(x.device.type, dtype=dtype, enabled=enabled):
            return self._place.unpack(self.blocks[index](*args, **kwargs)), None

    def epilogue(self, x: Tensor, context: LayerContext, batch: Mapping[str, Tensor]) -> LossOutput:
        """The model's own loss, with `x` as what its layers gave."""
        return self._run(batch, lambda index, args, kwargs: self._place.pack(x))

    def aux_metrics(self, counted: Sequence[Tensor]) -> dict[str, Tensor]:
        """Nothing: Hugging Face layers count nothing."""
        return {}

    def outer_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """What the prologue and the epilogue were seen to read."""
        return self._outer

    def _run(self, batch: Mapping[str, Tensor], visit: Visit) -> LossOutput:
        # A compiled whole would be compiled again around the stand-ins; else what is compiled here is the loss.
        whole = self.model.net._compiled_call_impl is not None
        with _stand_ins(self._place, visit), eager() if whole else nullcontext():
            return self.model.loss(batch)

    def look(self, batch: Mapping[str, Tensor]) -> None:
        """Find out which parameters are read outside of the layers, from the graphs of both ends."""
        first, calls = self.prologue(batch)
        with torch.no_grad():
            x = first
            for index in range(len(self.blocks)):
                x, _ = self.layer(index, x, calls)
        loss = self.epilogue(x.detach().requires_grad_(), calls, batch).loss_sum
        self._outer = (_leaves(first), _leaves(loss))


def layered_hf(model: HFModel) -> LayerwiseModel:
    """The model as a row of layers; kept whole, and said so in its notes, where it cannot be cut."""
    try:
        return _cut(model)
    except _NotSliceable as reason:
        model.notes.append(
            f"Layer-major execution keeps {type(model.net).__name__} whole, as one layer group: {reason}."
        )
        return SingleBlock(model)


def _cut(model: HFModel) -> HFLayers:
    batch = model.short_batch()
    with _undisturbed(model) as buffers, eager():
        model.loss(batch)  # what a model finds out about itself with its first batch, it finds out here
        view = HFLayers(model, _find_blocks(model, batch))
        _check_called_alike(view, batch)
        _compare(model, view, batch)
        _check_buffers_unchanged(model, buffers)
        view.look(batch)
    return view


# ---- finding the blocks ----


def _find_blocks(model: HFModel, batch: Mapping[str, Tensor]) -> _CallSite:
    lists = [
        _CallSite(parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child)
    ]
    sizes = {id(place): sum(p.numel() for p in place.blocks.parameters()) for place in lists}
    reasons = []
    for place in sorted(lists, key=lambda place: -sizes[id(place)]):
        try:
            return _follow(model, place, batch)
        except _NotSliceable as reason:
            reasons.append(f"{place.name}: {reason}")
    raise _NotSliceable("; ".join(reasons[:3]) or "it has no list of blocks")


@dataclass
class _Seen:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    out: Any = None


def _follow(model: HFModel, place: _CallSite, batch: Mapping[str, Tensor]) -> _CallSite:
    """Run the model and watch its blocks; where the stream goes through them.

    Raises:
        _NotSliceable: it is not one stream through each block once.
    """
    seen: list[tuple[int, _Seen]] = []
    blocks = list(place.blocks)

    def visit(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Seen(args, dict(kwargs))
        seen.append((index, call))
        call.out = blocks[index](*args, **kwargs)
        return call.out

    with _stand_ins(place, visit):
        model.loss(batch)
    if [index for index, _ in seen] != list(range(len(blocks))):
        raise _NotSliceable("its members are not called once each, in order")
    calls = [call for _, call in seen]
    tuple_of = len(calls[0].out) if isinstance(calls[0].out, tuple) else 0
    streams = [call.out[0] if tuple_of else call.out for call in calls]
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in streams):
        raise _NotSliceable("a block's output is no tensor")
    place = _CallSite(place.parent, place.name, _slot(calls, streams), tuple_of)
    for call in calls:
        rest = LayerCall.seen(place.slot, call.args, call.kwargs)
        if any(t.requires_grad for t in tensors_of((rest.args, rest.kwargs))):
            raise _NotSliceable("a block reads a second tensor that needs a gradient")
    return place


def _slot(calls: list[_Seen], streams: list[Tensor]) -> int | str:
    """Where a block gets what the one before gave."""
    if len(calls) == 1:
        slots = {key for key, value in [*enumerate(calls[0].args), *calls[0].kwargs.items()] if _asks(value)}
    else:
        slots = {key for key, value in [*enumerate(calls[1].args), *calls[1].kwargs.items()] if value is streams[0]}
    for slot in slots:
        given = [c.args[slot] if isinstance(slot, int) else c.kwargs.get(slot) for c in calls if _has(c, slot)]
        if len(given) == len(calls) and all(a is b for a, b in zip(given[1:], streams, strict=False)):
            return slot
    raise _NotSliceable("a block does not read what the one before gave")


def _asks(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _has(call: _Seen, slot: int | str) -> bool:
    return slot < len(call.args) if isinstance(slot, int) else slot in call.kwargs


# ---- trying the cut ----


def _check_called_alike(view: HFLayers, batch: Mapping[str, Tensor]) -> None:
    """Raise where layers are called with objects that are made anew for each batch: only tensors may be."""
    view.context(batch)
    view.context(batch)
    if len(view.calls) > 1:
        raise _NotSliceable("its layers read an object that is made anew for each batch and is no tensor")


def _compare(model: HFModel, view: HFLayers, batch: Mapping[str, Tensor]) -> None:
    """Loss, and gradient at the first layer, cut and uncut, without dropout.

    Raises:
        _NotSliceable: they differ.
    """
    model.eval()
    firsts: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        call = LayerCall.seen(view._place.slot, args, kwargs)
        firsts.append(view._place.stream(args, kwargs).detach().requires_grad_())
        return call.arguments(view._place.slot, firsts[0])

    handle = view.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        loss = model.loss(batch).loss_sum
        (grad,) = torch.autograd.grad(loss, firsts)
    finally:
        handle.remove()
    cut, cut_grad = _cut_loss(view, batch)
    model.train()
    if not _alike(loss.detach(), cut) or not _alike(grad, cut_grad):
        raise _NotSliceable(
            f"cut at {view._place.name} it is not the same model (loss {loss.item():.6g} and {cut.item():.6g})"
        )


def _cut_loss(view: HFLayers, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient at the first layer, as the executor computes them: each layer in its own graph."""
    with torch.no_grad():
        x, calls = view.prologue(batch)
        inputs = [x]
        for index in range(len(view.blocks)):
            inputs.append(view.layer(index, inputs[-1], calls)[0])
    x = inputs.pop().detach().requires_grad_()
    loss = view.epilogue(x, calls, batch).loss_sum
    (grad,) = torch.autograd.grad(loss, x)
    for index in reversed(range(len(view.blocks))):
        x = inputs.pop().detach().requires_grad_()
        (grad,) = torch.autograd.grad(view.layer(index, x, calls)[0], x, grad)
    return loss.detach(), grad


def _alike(a: Tensor, b: Tensor) -> bool:
    scale = max(float(a.abs().max()), 1e-30)
    return bool((a - b).abs().max() <= _CLOSE * scale)


def _check_buffers_unchanged(model: HFModel, before: Mapping[str, Tensor]) -> None:
    """Raise where the passes so far have changed what the next one computes."""
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    if changed:
        raise _NotSliceable(f"a forward pass changes {changed[0]}, so a layer cannot be computed twice")


# ---- small parts ----


@contextmanager
def _stand_ins(place: _CallSite, visit: Visit) -> Iterator[None]:
    """The list of blocks is a list of stand-ins inside."""
    real = place.blocks
    place.parent._modules[place.name] = nn.ModuleList(_StandIn(i, layer, visit) for i, layer in enumerate(real))
    try:
        yield
    finally:
        place.parent._modules[place.name] = real


@contextmanager
def _undisturbed(model: HFModel) -> Iterator[dict[str, Tensor]]:
    """In training mode inside; mode, generators and buffers are as they were afterwards. Gives copies of these."""
    was_training = model.training
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = {param.device for param in model.parameters() if param.is_cuda}
    try:
        model.train()
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield buffers
    finally:
        model.train(was_training)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _leaves(root: Tensor) -> list[nn.Parameter]:
    """The parameters in the graph of a tensor."""
    found, seen, todo = {}, set(), [root.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
            found[variable] = None
        todo.extend(edge for edge, _ in node.next_functions)
    return list(found)
