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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.base.eval_mode import eager
from tilewright.models.base.protocols import LayerContext, LossOutput
from tilewright.models.base.stand_ins import Visit, stand_ins
from tilewright.models.distill.foreign_hidden import call_layer, learned, without_values
from tilewright.models.distill.hidden import of_batch
from tilewright.models.hf.model import HFModel
from tilewright.models.layerwise.hf_blocks import CallSite, NotSliceableError, find_blocks
from tilewright.models.layerwise.layer_calls import LayerCall, LayerCalls
from tilewright.models.layerwise.layer_view import LayerwiseModel, SingleBlock

_CLOSE = 1e-4
"""Relative difference of losses and gradients that is rounding: a cut changes no operation, only where autocast's
copies of weights are made."""


class _Reached(Exception):
    """Ends a forward pass where the layers begin, so that only the prologue runs."""


class HFLayers:
    """A Hugging Face model as a `LayerwiseModel`. Made by `layered`."""

    def __init__(self, model: HFModel, place: CallSite) -> None:
        self.model = model
        self._place = place
        self.blocks: Sequence[nn.Module] = tuple(place.blocks)
        self.calls = LayerCalls()
        self._outer: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        self.before: tuple[nn.Module, ...] = ()
        """Modules with parameters that the prologue was seen to call, and that alone."""
        self.both: tuple[nn.Module, ...] = ()
        """Those whose own parameters the epilogue reads too, through them."""
        self.streams: tuple[Tensor, ...] = ()
        """Stand-ins on the meta device for what each layer was seen to get, and for what the last one gave."""

    def context(self, batch: Mapping[str, Tensor]) -> LayerContext:
        """The arguments of a Hugging Face model's layers besides the stream. Parameters outside of the layers need no
        values."""
        return self._without_values(batch)[1]

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the stream between a Hugging Face model's layers, in the formats that the model has now."""
        return self._without_values(self.model.short_batch())[0].dtype

    def _without_values(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, LayerContext]:
        devices = {param.device for param in self.model.parameters() if param.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(devices), self._no_prologue():
            return self.prologue(batch)

    def prologue(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, LayerContext]:
        """Run a Hugging Face model up to its first layer: the stream there, and how each layer is called."""
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
            return streams[0], {**self.calls.pack(calls), **of_batch(batch)}
        raise AssertionError("the last layer was not reached, as it was when the blocks were found")

    def layer(self, index: int, x: Tensor, context: LayerContext) -> tuple[Tensor, None]:
        """One layer of a layerwise Hugging Face model, called as its model calls it."""
        call = self.calls.call(index, context)
        enabled, dtype = call.autocast
        args, kwargs = call.arguments(self._place.slot, x)
        with torch.autocast(x.device.type, dtype=dtype, enabled=enabled):
            whole = self.model.hidden_loss, index, self.blocks[index], self.model.attention_of
            out, given = call_layer(*whole, args, kwargs)
        return learned(self.model.hidden_loss, index, self._place.unpack(out), given, context), None

    def epilogue(self, x: Tensor, context: LayerContext, batch: Mapping[str, Tensor]) -> LossOutput:
        """A layerwise Hugging Face model's own loss, with `x` as what its layers gave."""
        with self.giving(x):
            out = self.model(without_values(batch))
        return out if self.model.hidden_loss is None else self.model.hidden_loss.added(out, context)

    @contextmanager
    def giving(self, x: Tensor) -> Iterator[None]:
        """Inside, a layerwise Hugging Face model's own methods run with `x` as what its layers gave. What comes before
        the layers runs too, and its stream is dropped."""
        with self._no_prologue(), self._visited(lambda index, args, kwargs: self._place.pack(x)):
            yield

    def hold(self, layers: nn.ModuleList) -> None:
        """Hold some layers of a layerwise Hugging Face model: let it have these alone, under the names that they have
        in the list. The others stay known for what the model asks its layers for; on the meta device they have no
        memory."""
        self._place.parent._modules[self._place.name] = layers

    def aux_metrics(self, counted: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return no metrics: layers of a Hugging Face model count nothing."""
        return {}

    def outer_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Outer parameters of a layerwise Hugging Face model, that the prologue and the epilogue were seen to read; in
        both what layers share."""
        first, last = self._outer
        shared = () if self.model.hidden_loss is None else tuple(self.model.hidden_loss.parameters())
        return [*first, *shared], [*last, *shared]

    def _run(self, batch: Mapping[str, Tensor], visit: Visit) -> LossOutput:
        with self._visited(visit):
            return self.model(without_values(batch))

    @contextmanager
    def _visited(self, visit: Visit) -> Iterator[None]:
        # A compiled whole would be compiled again around the stand-ins; else what is compiled here is the loss.
        whole = self.model.net._compiled_call_impl is not None
        with stand_ins(self._place.parent, self._place.name, visit, self.blocks), eager() if whole else nullcontext():
            yield

    @contextmanager
    def _no_prologue(self) -> Iterator[None]:
        """Inside, what only the prologue of a layerwise Hugging Face model reads has no values: shards may be
        elsewhere, and the stream is dropped."""
        held = [(module, name, param) for module in self.before for name, param in module._parameters.items()]
        held = [(module, name, param) for module, name, param in held if param is not None]
        for module, name, param in held:
            module._parameters[name] = vacant_like(param)  # type: ignore[assignment]
        try:
            yield
        finally:
            for module, name, param in held:
                module._parameters[name] = param

    def outside(self) -> list[nn.Module]:
        """Modules of a layerwise Hugging Face model with parameters of their own outside of the layers."""
        inside = {module for block in self.blocks for module in block.modules()}
        found = (module for module in self.model.modules() if module not in inside)
        return [module for module in found if any(param is not None for param in module._parameters.values())]

    def _watched_prologue(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, LayerContext]:
        called: dict[nn.Module, None] = {}
        handles = [
            module.register_forward_pre_hook(lambda module, _: called.update({module: None}))
            for module in self.outside()
        ]
        try:
            return self.prologue(batch)
        finally:
            self.before = tuple(called)
            for handle in handles:
                handle.remove()

    def look(self, batch: Mapping[str, Tensor]) -> None:
        """Find the parameters that a Hugging Face model reads outside of its layers, from the graphs of both ends."""
        first, calls = self._watched_prologue(batch)
        with torch.no_grad():
            xs = [first]
            for index in range(len(self.blocks)):
                xs.append(self.layer(index, xs[-1], calls)[0])
        x, self.streams = xs[-1], tuple(torch.empty_like(x, device="meta") for x in xs)
        called, self.before = self.before, ()
        loss = self.epilogue(x.detach().requires_grad_(), calls, batch).loss_sum
        self._outer = (_leaves(first), _leaves(loss))
        holders = Counter(id(param) for module in self.outside() for param in module._parameters.values())
        alone = {id(param) for param in self._outer[1] if holders[id(param)] == 1}
        self.both = tuple(m for m in called if any(id(p) in alone for p in m._parameters.values()))
        self.before = tuple(module for module in called if module not in self.both)
        with torch.no_grad():
            if not _alike(self.epilogue(x, calls, batch).loss_sum, loss.detach()):
                self.before, self.both = (), called


def layered_hf(model: HFModel) -> LayerwiseModel:
    """A Hugging Face model as a row of layers; kept whole, and said so in its notes, where it cannot be cut."""
    view = cut_hf(model)
    if isinstance(view, HFLayers):
        return view
    model.notes.append(f"Layer-major execution keeps {type(model.net).__name__} whole, as one layer group: {view}.")
    return SingleBlock(model)


def cut_hf(model: HFModel) -> HFLayers | str:
    """Cut a Hugging Face model to a row of layers, or say why it cannot be."""
    try:
        return _cut(model)
    except NotSliceableError as reason:
        return str(reason)


def vacant_like(param: Tensor) -> Tensor:
    """Make zeros of a parameter's shape, dtype and device, with memory for one of them."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)


def _cut(model: HFModel) -> HFLayers:
    batch = model.short_batch()
    with _undisturbed(model) as buffers, eager():
        model.loss(batch)  # what a model finds out about itself with its first batch, it finds out here
        view = HFLayers(model, find_blocks(model, batch))
        _check_called_alike(view, batch)
        _compare(model, view, batch)
        _check_buffers_unchanged(model, buffers)
        view.look(batch)
    return view


# ---- trying the cut ----


def _check_called_alike(view: HFLayers, batch: Mapping[str, Tensor]) -> None:
    """Check a layerwise Hugging Face model: raise where layers are called with another object for each batch: only
    tensors may change."""
    view.context(batch)
    view.context(batch)
    if len(view.calls) > 1:
        raise NotSliceableError("its layers read an object that is another one for each batch and is no tensor")


def _compare(model: HFModel, view: HFLayers, batch: Mapping[str, Tensor]) -> None:
    """Compare a Hugging Face model cut into layers and uncut: loss, and gradient at the first layer, without dropout.

    Raises:
        NotSliceableError: they differ.
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
        raise NotSliceableError(
            f"cut at {view._place.name} it is not the same model (loss {loss.item():.6g} and {cut.item():.6g})"
        )


def _cut_loss(view: HFLayers, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of a Hugging Face model cut into layers, and its gradient at the first one, as the executor computes
    them: each layer in its own graph."""
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
    """Check a layerwise Hugging Face model: raise where the passes so far have changed what the next one computes."""
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    if changed:
        raise NotSliceableError(f"a forward pass changes {changed[0]}, so a layer cannot be computed twice")


# ---- small parts ----


@contextmanager
def _undisturbed(model: HFModel) -> Iterator[dict[str, Tensor]]:
    """Undisturbed inside, in training mode, a layerwise Hugging Face model: mode, generators and buffers are as they
    were afterwards. Gives copies of these."""
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
    """The parameters at the leaves of a tensor's autograd graph."""
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
