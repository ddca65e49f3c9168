"""All micro-batches through one layer group of layers, then the next: forward, and backward by recomputation.

    run = LayerMajor(view, layer_groups, inputs=..., residence=..., replay=..., phase=...)
    run.keeps = frozenset({3})  # layer groups whose graphs are kept instead
    run.forward(batches)  # keeps the input of each layer group, and nothing else
    run.backward(factor, done)  # done(layer group): its gradients are in `.grad`, whole; None afterwards
    run.end()

So one layer group's activations and one layer group's gradients are alive at a time, and a layer group can be updated
in `done`, before the backward pass continues: nothing will read the old values any more. `backward` may be called
again, as long as no `done` has changed a parameter; graphs that were kept are gone then, and their layer groups are
recomputed like the others. A piece of it that finds no memory may be done again: `retry` is around each. The gradient
is that of the whole batch, summed in FP32 for 16-bit parameters.

What moves layer groups to the device is `param_store`, what keeps layer inputs `activations`. Updates, clipping and
what to do with bad numbers are the matter of `training.executor.layer_major`, which calls this."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilewright.memory.layer_major.embedding_rows import RowGradients
from tilewright.memory.layer_major.replay_random import Replay
from tilewright.memory.layer_major.saved_views import rebind_saved_views
from tilewright.memory.offload.activations import ActivationStore
from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.models.base.protocols import LayerContext, LossOutput
from tilewright.models.layerwise.layer_view import LayerGroup, LayerGroups, LayerwiseModel

Batch = Mapping[str, Tensor]
Phase = Callable[[str], AbstractContextManager[None]]
Retry = Callable[[Callable[[], Any], Callable[[], None]], Any]
"""Calls a function, and again after the second where it finds no memory, until it succeeds or nothing helps."""


class LayerMajor:
    """One step's passes over a model cut into layer groups.

    Args:
        view: the model, to be run layer by layer. layer groups: its parameters. inputs: keeps layer inputs between the
        passes. residence: brings layer groups to the device. replay: makes the second pass draw and choose as the
        first. phase: measures what runs inside: forward, backward. device: where batches are. retry: called with each
        piece of a backward pass (one micro-batch through one layer group), and with what frees the
            kept graphs. A piece that failed leaves everything so that it can be called again, for the same result.
    """

    def __init__(
        self,
        view: LayerwiseModel,
        layer_groups: LayerGroups,
        *,
        inputs: ActivationStore,
        offloader: ParamOffloader,
        replay: Replay,
        phase: Phase,
        device: torch.device,
        retry: Retry,
    ) -> None:
        self.view = view
        self.layer_groups = layer_groups
        self.inputs = inputs
        self.offloader = offloader
        self.replay = replay
        self.device = device
        self.keeps: frozenset[int] = frozenset()
        """Places of the layer groups whose graphs live from forward to the first backward. Set between steps."""
        self.each: list[Tensor | None] = []
        """`LossOutput.each` of each micro-batch, from the last backward pass."""
        self.told: list[Mapping[str, Tensor]] = []
        """`LossOutput.aux` of the same: what the loss tells beside itself."""
        self.retry = retry
        self._phase = phase
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._batches: Sequence[Batch] = ()
        self._contexts: list[LayerContext] = []
        self._counted: list[list[Tensor]] = []

    # ---- forward ----

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch]) -> bool:
        """Run all micro-batches forward through all layers, layer-major; returns whether the last outputs are finite.

        Args:
            batches: micro-batches on the device.
        """
        self._batches, self._contexts, self._counted = batches, [], [[] for _ in batches]
        self.each, self.told = [], []
        with self._phase("forward"):
            xs = self._forward_prologue()
            for place, part in enumerate(self.layer_groups.groups):
                with self._live(part, self._after(place)):
                    for micro, x in enumerate(xs):
                        keep = place in self.keeps
                        self.inputs.put(place, micro, x, exact=keep, here=keep)
                        xs[micro] = (self._keep_layers if keep else self._forward_layers)(place, micro, x)
            finite = torch.ones((), dtype=torch.bool, device=self.device)
            for micro, x in enumerate(xs):
                self.inputs.put(len(self.layer_groups.groups), micro, x, exact=True)
                finite &= x.isfinite().all()
        return bool(finite)

    def _forward_prologue(self) -> list[Tensor]:
        xs = []
        with self._live(self.layer_groups.prologue, self._after(-1)):
            for micro, batch in enumerate(self._batches):
                run = _Prologue(self.view, batch)
                xs.append(self.replay.record(("prologue", micro), None, run))
                self._contexts.append(run.context)
        return xs

    def _keep_layers(self, place: int, micro: int, x: Tensor) -> Tensor:
        """A layer-major forward pass, `_forward_layers`, whose graph is kept."""
        part, start = self.layer_groups.groups[place], x.detach().requires_grad_()
        stays = self.offloader.homes(part)[0] == "device"
        around = nullcontext() if stays else rebind_saved_views(part.params)
        with torch.enable_grad(), around:
            out = self._forward_layers(place, micro, start)
        self._graphs[place, micro] = start, out
        return out.detach()

    def _forward_layers(self, place: int, micro: int, x: Tensor) -> Tensor:
        for index in self.layer_groups.groups[place].layers:
            x, counted = self._run_layer(index, micro, x, self.replay.record)
            if counted is not None:
                self._counted[micro].append(counted.detach())
        return x

    def _run_layer(self, index: int, micro: int, x: Tensor, how: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        context = self._contexts[micro]
        return how((index, micro), self.view.blocks[index], lambda: self.view.layer(index, x, context))

    def aux_metrics(self) -> list[dict[str, Tensor]]:
        """The counts of the layers in layer-major passes, by micro-batch. Once per forward pass."""
        return [self.view.aux_metrics(counted) for counted in self._counted]

    # ---- backward ----

    def backward(
        self,
        factor: float,
        done: Callable[[LayerGroup], object],
        *,
        after_loss: Callable[[float], None] | None = None,
        last: bool = True,
    ) -> float:
        """Run all layers backward, layer-major, from the loss to the prologue; returns the loss summed over all
        targets.

        Args:
            factor: the gradient is that of the summed loss times this.
            done: called with each layer group once its gradient is whole. Its parameters' `.grad` is None where nothing
                reads them.
            after_loss: called with the summed loss before the first `done`.
            last: there is no further call for this forward pass, so layer inputs are freed on the way.
        """
        with self._phase("backward"):
            loss, grads = self._backward_epilogue(factor, done, after_loss, last)
            for place in reversed(range(len(self.layer_groups.groups))):
                part = self.layer_groups.groups[place]
                with self._live(part, self._before(place), changed=last):
                    self._backward_layers(place, part, grads, last)
                    self._finish(part, done)
            with self._live(self.layer_groups.prologue, None, changed=last):
                self._backward_prologue(grads)
                self._finish(self.layer_groups.prologue, done)
            self._finish(self.layer_groups.shared, done)
        return loss

    def _backward_epilogue(
        self,
        factor: float,
        done: Callable[[LayerGroup], object],
        after_loss: Callable[[float], None] | None,
        last: bool,
    ) -> tuple[float, list[Tensor | None]]:
        place, part = len(self.layer_groups.groups), self.layer_groups.epilogue
        wanted = [*part.trained, *self.layer_groups.shared.trained]
        loss_sum = torch.zeros((), dtype=torch.float64 if self.device.type == "cpu" else torch.float32)
        loss_sum = loss_sum.to(self.device)
        grads: list[Tensor | None] = []
        self.each, self.told = [], []
        with self._live(part, self._before(place), changed=last):
            for micro in range(len(self._batches)):
                loss_one, grad, each, told = self.retry(
                    _Piece(self._epilogue_piece, wanted, micro, factor), self.free_saved_graphs
                )
                self._drop(place, micro, last)
                loss_sum += loss_one
                grads.append(grad)
                self.each.append(each)
                self.told.append(told)
            loss = float(loss_sum)
            if after_loss is not None:
                after_loss(loss)
            self._finish(part, done)
        return loss, grads

    def _epilogue_piece(
        self, wanted: list[Tensor], micro: int, factor: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Mapping[str, Tensor]]:
        """A piece of layer-major passes, the epilogue: one micro-batch's loss, its gradient at the last layer's output,
        the loss of each target, and the rest."""
        x = self.inputs.get(len(self.layer_groups.groups), micro).requires_grad_()
        out = self._run_epilogue(micro, x)
        (out.loss_sum * factor).backward(inputs=[x, *wanted])
        return out.loss_sum.detach(), x.grad, out.each, out.aux

    def _run_epilogue(self, micro: int, x: Tensor) -> LossOutput:
        key, batch, context = ("epilogue", micro), self._batches[micro], self._contexts[micro]
        how = self.replay.replay if self.replay.knows(key) else self.replay.record
        return how(key, None, lambda: self.view.epilogue(x, context, batch))

    def _backward_layers(self, place: int, part: LayerGroup, grads: list[Tensor | None], last: bool) -> None:
        wanted = [*part.trained, *self.layer_groups.shared.trained]
        for micro, grad in enumerate(grads):
            if micro + 1 < len(grads):
                self.inputs.prefetch(place, micro + 1)
            elif place:
                self.inputs.prefetch(place - 1, 0)
            grads[micro] = self.retry(_Piece(self._layers_piece, wanted, place, micro, grad), self.free_saved_graphs)
            self._drop(place, micro, last)

    def _layers_piece(self, wanted: list[Tensor], place: int, micro: int, grad: Tensor | None) -> Tensor | None:
        """Compute a layer group's gradient at its input, for one micro-batch."""
        start, out = self._graph(place, micro)
        if grad is not None:
            out.backward(grad, inputs=[start, *wanted])
        return start.grad

    def _graph(self, place: int, micro: int) -> tuple[Tensor, Tensor]:
        """A layer group's input and output and the graph between them, as it was kept, or recomputed."""
        kept = self._graphs.pop((place, micro), None)
        if kept is not None:
            return kept
        start = x = self.inputs.get(place, micro).requires_grad_()
        for index in self.layer_groups.groups[place].layers:
            x, _ = self._run_layer(index, micro, x, self.replay.replay)
        return start, x

    def _backward_prologue(self, grads: list[Tensor | None]) -> None:
        wanted = [*self.layer_groups.prologue.trained, *self.layer_groups.shared.trained]
        for micro, grad in enumerate(grads):
            if wanted and grad is not None:
                self.retry(_Piece(self._prologue_piece, wanted, micro, grad), self.free_saved_graphs)
            grads[micro] = None

    def _prologue_piece(self, wanted: list[Tensor], micro: int, grad: Tensor) -> None:
        with RowGradients():
            x = self.replay.replay(("prologue", micro), None, _Prologue(self.view, self._batches[micro]))
        if x.requires_grad:
            x.backward(grad, inputs=wanted)

    def _drop(self, place: int, micro: int, last: bool) -> None:
        if last:
            self.inputs.drop(place, micro)

    def free_saved_graphs(self) -> None:
        """Free graphs of layer-major passes that are kept; their layer groups are recomputed instead, for the same
        gradients."""
        self._graphs.clear()

    @staticmethod
    def _finish(part: LayerGroup, done: Callable[[LayerGroup], object]) -> None:
        done(part)
        for param in part.params:
            param.grad = None

    # ---- around both ----

    def end(self) -> None:
        """End layer-major passes: forget the step: its inputs, graphs, draws and gradients."""
        self._graphs.clear()
        self.inputs.clear()
        self.replay.clear()
        for part in self.layer_groups:
            for param in part.params:
                param.grad = None
        self._batches, self._contexts, self._counted = (), [], []

    def _after(self, place: int) -> LayerGroup:
        """The layer group after that of this place, which the layer-major forward pass reads."""
        groups = self.layer_groups.groups
        return groups[place + 1] if place + 1 < len(groups) else self.layer_groups.epilogue

    def _before(self, place: int) -> LayerGroup:
        """The layer group before that of this place, which the layer-major backward pass reads."""
        return self.layer_groups.groups[place - 1] if place else self.layer_groups.prologue

    @contextmanager
    def _live(self, part: LayerGroup, following: LayerGroup | None, *, changed: bool = False) -> Iterator[None]:
        self.offloader.fetch(part, states=changed)
        try:
            if following is not None:
                self.offloader.prefetch(following, states=changed)
            yield
        finally:
            self.offloader.release(part, changed=changed)


class _Piece:
    """A piece of the backward pass as a function of nothing that can be called again where it failed.

    Gradients add up over the pieces, so what one call has added for a parameter the next one must not add again:
    autograd changes a `.grad` in one go, and whether it has shows in the tensor's identity and version.

    Args:
        run: called with the parameters whose gradients are still wanted, and `args`.
        wanted: parameters.
        args: anything else.
    """

    def __init__(self, run: Callable[..., Any], wanted: Sequence[Tensor], *args: Any) -> None:
        self._run, self._wanted, self._args = run, wanted, args
        self._before = [_version(param) for param in wanted]

    def __call__(self) -> Any:
        rows = zip(self._wanted, self._before, strict=True)
        return self._run([param for param, before in rows if _version(param) == before], *self._args)


def _version(param: Tensor) -> tuple[int, int] | None:
    return None if param.grad is None else (id(param.grad), param.grad._version)


class _Prologue:
    """The prologue as a function of nothing that gives x; the context stays here."""

    def __init__(self, view: LayerwiseModel, batch: Batch) -> None:
        self._view, self._batch = view, batch
        self.context: LayerContext = {}

    def __call__(self) -> Tensor:
        x, self.context = self._view.prologue(self._batch)
        return x
