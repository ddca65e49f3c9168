"""Memory and FLOPs of one layer, found by running it alone, forward and backward, on fake tensors.

The model is run once as a whole, so that each layer gets the arguments that it would get; a hook measures the layer
where it stands, inside whatever its model wraps around it. A run of a layer takes some tenths of a second: what is not
asked for is not measured, and a run gives all numbers that can be had from it.

Legend: B rows  S positions.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from tilewright.models.base.checkpointing import POLICIES
from tilewright.planner.trace.byte_counter import EagerLiveBytes, GemmKind, flops_of, tensors_in
from tilewright.planner.trace.routed_rows import ExpertCalls, RoutedRows

MLP_NAME = re.compile(r"mlp|feed_forward|ffn|block_sparse_moe")
"""What the part of a layer is called that looks at each token for itself."""


class Measures(Flag):
    """The measures of traced layers: the three parts of `TracedLayers`."""

    MEMORY = auto()
    TRAFFIC = auto()
    FLOPS = auto()
    ALL = MEMORY | TRAFFIC | FLOPS


@dataclass(frozen=True)
class TracedMemory:
    """Bytes of one layer in one micro-batch.

    `kept`, `kept_selective`, `kept_matmuls`, `kept_attention`: from forward to backward, its input among them, its
    output not; with all kept, with results of matmuls and attention, of one of them alone. `input`: of its input.
    `work`: most that backward has alive beyond `kept`, gradients of weights left out. `mlp_kept`, `mlp_work`: kept and
    needed by its token-wise part alone; 0 where none was found.
    """

    kept: int
    kept_selective: int
    kept_matmuls: int
    kept_attention: int
    input: int
    work: int
    mlp_kept: int
    mlp_work: int


@dataclass(frozen=True)
class TracedTraffic:
    """Bytes of one layer in one micro-batch, forward and backward. `moved`: read and written by what is neither matmul
    nor attention; `fresh`: of that, written into new memory. `operations`: calls of all operations."""

    moved: int
    fresh: int
    operations: int


@dataclass(frozen=True)
class TracedFlops:
    """FLOPs of one layer in the forward pass of one micro-batch, and what its experts read in it.

    `gemms`: calls and FLOPs of matmuls, linear layers by their names in the layer. `last_matmuls`: of those at
    its end that recomputation does not run again. `mlp_matmuls`: of its token-wise part's. `attention`: fused
    attention, all pairs of positions. `routed`: rows of stacked experts.
    """

    gemms: Mapping[GemmKind, tuple[int, float]]
    last_matmuls: float
    mlp_matmuls: float
    attention: float
    routed: RoutedRows = field(default_factory=RoutedRows)

    @property
    def matmuls(self) -> float:
        """FLOPs of all matmuls of a traced layer."""
        return flops_of(self.gemms)


@dataclass(frozen=True)
class TracedLayers:
    """The measurements of each layer; a part that was not measured is empty."""

    memory: tuple[TracedMemory, ...] = ()
    traffic: tuple[TracedTraffic, ...] = ()
    flops: tuple[TracedFlops, ...] = ()


class _AllMeasured(Exception):
    """Ends a run in which the last layer was measured."""


def trace_layers(
    layers: Sequence[nn.Module], run: Callable[[], object], measures: Measures = Measures.ALL
) -> TracedLayers:
    """Trace each layer where `run` comes to it first; behind the last of them it is not run on. Needs fake tensors all
    around.

    Raises:
        ValueError: a layer that does not run.
    """
    if not layers:
        return TracedLayers()
    found: dict[int, _LayerProbe] = {}
    busy = []

    def measure(layer: nn.Module, args: Any, kwargs: Any) -> None:
        if busy or id(layer) in found:  # the measurement calls the layer too
            return
        busy.append(layer)
        found[id(layer)] = _LayerProbe(layer, args, kwargs, measures)
        busy.pop()
        if len(found) == len(layers):
            raise _AllMeasured

    handles = [layer.register_forward_pre_hook(measure, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad(), suppress(_AllMeasured):
            run()
    finally:
        for handle in handles:
            handle.remove()
    if len(found) < len(layers):
        raise ValueError("a layer of the model's list does not run")
    probes = [found[id(layer)] for layer in layers]
    return TracedLayers(
        memory=tuple(probe.memory for probe in probes if probe.memory is not None),
        traffic=tuple(probe.traffic for probe in probes if probe.traffic is not None),
        flops=tuple(probe.flops for probe in probes if probe.flops is not None),
    )


class _LayerProbe:
    """Runs one layer on the arguments that its model gives it, as often as it takes to measure what is asked for."""

    def __init__(self, layer: nn.Module, args: Any, kwargs: Any, measures: Measures) -> None:
        self.memory: TracedMemory | None = None
        self.flops: TracedFlops | None = None
        traffic, more = Measures.TRAFFIC in measures, bool(measures & (Measures.MEMORY | Measures.FLOPS))
        experts, part, selected = ExpertCalls(layer), _MlpCall(layer), _Selected()
        with experts.watched():
            whole = _run(layer, args, kwargs, traffic=traffic, work=more)
        self.traffic = whole.traffic
        if not more:
            return
        with part.watched(), selected.dropping():
            some = _run(layer, args, kwargs, work=False, live=selected)
        mlp = None if part.call is None else _run(part.mlp, *part.call)
        if Measures.MEMORY in measures:
            self.memory = TracedMemory(
                kept=whole.kept,
                kept_selective=some.kept,
                kept_matmuls=some.kept - selected.only("attention", some.out),
                kept_attention=some.kept - selected.only("matmuls", some.out),
                input=_first((args, kwargs)).nbytes,
                work=whole.work,
                # What leaves the part is the layer's, and what it reads the norm's before it.
                mlp_kept=0 if mlp is None else max(0, mlp.kept - _first(part.call).nbytes),
                mlp_work=0 if mlp is None else mlp.work,
            )
        if Measures.FLOPS in measures:
            self.flops = TracedFlops(
                gemms=whole.gemms,
                last_matmuls=selected.flops_behind,
                mlp_matmuls=0.0 if mlp is None else flops_of(mlp.gemms),
                attention=whole.attention,
                routed=experts.rows,
            )


class _MlpCall:
    """The token-wise part of a layer, and arguments like those that it is called with; None where it is not."""

    def __init__(self, layer: nn.Module) -> None:
        self.mlp = next((child for name, child in layer.named_children() if MLP_NAME.search(name)), nn.Module())
        self.call: tuple[Any, Any] | None = None
        self._seen: Any = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a traced layer runs its MLP. Of what it gives the part only the form is noted, so that no byte lives
        longer."""
        handle = self.mlp.register_forward_pre_hook(self._see, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        if self._seen is not None:
            made: dict[_Form, Tensor] = {}
            self.call = tree_map(lambda leaf: leaf.tensor(made) if isinstance(leaf, _Form) else leaf, self._seen)

    def _see(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._seen is None:
            self._seen = tree_map(lambda leaf: _Form.of(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))


@dataclass(frozen=True)
class _Form:
    """A tensor without its bytes. `key`: the same of one tensor."""

    key: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "_Form":
        """The form (shape, dtype) of a tensor of a traced layer."""
        return cls(id(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def tensor(self, made: dict["_Form", Tensor]) -> Tensor:
        """A tensor of this form for a traced layer, one for each key."""
        if self not in made:
            made[self] = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made[self]


class _Selected(EagerLiveBytes):
    """Counts a forward pass that keeps results of matmuls and of attention, and which of them are whose: what selective
    checkpointing keeps. Nothing runs backward from it."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, dict[int, int]] = {"matmuls": {}, "attention": {}}
        self._held: list[torch.UntypedStorage] = []
        self._at_last_saved = 0.0

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Inside, what backward of a traced layer wants is dropped, as `checkpoint` does."""

        def drop(_: Tensor) -> None:
            self._at_last_saved = self.flops

        with torch.autograd.graph.saved_tensors_hooks(drop, _is_gone):
            yield

    @property
    def flops_behind(self) -> float:
        """FLOPs of a traced layer after the last tensor that backward wants, where `checkpoint` stops to recompute."""
        return self.flops - self._at_last_saved

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of a traced layer, count it and hold what is kept of it."""
        out = super().run(func, args, kwargs)
        for mode, kept in self._kept.items():
            if POLICIES[mode](None, func) is CheckpointPolicy.MUST_SAVE:
                for tensor in tensors_in((out,)):
                    storage = tensor.untyped_storage()
                    self._held.append(storage)
                    if storage._cdata in self._times_of:
                        kept[storage._cdata] = self.times * storage.nbytes()
        return out

    def only(self, mode: str, out: int) -> int:
        """Bytes that a traced layer keeps for one of the two modes alone. `out`: of the storage that is there whatever
        is kept."""
        others = {key for name, kept in self._kept.items() for key in kept if name != mode} | {out}
        return sum(size for key, size in self._kept[mode].items() if key not in others)


def _is_gone(_: None) -> Tensor:
    raise AssertionError("backward of a pass whose tensors were dropped")


@dataclass(frozen=True)
class _Pass:
    """A forward pass, and what was counted in it and in backward. `kept`: bytes alive after forward, its output counted
    as its input would be; `gemms`, `attention`: of forward; `work`: most bytes that backward has alive beyond those
    kept."""

    kept: int
    gemms: Mapping[GemmKind, tuple[int, float]]
    attention: float
    out: int
    """Of its storage."""
    traffic: TracedTraffic | None
    work: int


@torch.enable_grad()
def _run(
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    traffic: bool = False,
    work: bool = True,
    live: EagerLiveBytes | None = None,
) -> _Pass:
    """Run a traced layer, or a part of one, forward once, and backward from it for each thing that is asked for.

    `traffic`: count what a layer moves, with gradients of its weights in backward. `work`: count the bytes that
    backward to the input alone has alive. `live`: what counts.
    """
    first = _first((args, kwargs))
    edge = first.detach().requires_grad_()
    args, kwargs = _replaced((args, kwargs), first, edge)
    live, moved = live or EagerLiveBytes(), None
    with live.watching(run) if isinstance(run, nn.Module) else nullcontext(), live:
        out = _first(run(*args, **kwargs))
        kept, gemms, attention = live.live, dict(live.gemms), live.attention
        live.in_backward = True
        if traffic:
            assert isinstance(run, nn.Module)
            _backward(out, [edge, *(p for p in run.parameters() if p.requires_grad)], again=work)
            moved = TracedTraffic(live.moved, live.fresh, live.operations)
        before = live.peak = live.live
        if work:
            _backward(out, [edge])
    return _Pass(kept, gemms, attention, out.untyped_storage()._cdata, moved, live.peak - before)


def _backward(out: Tensor, to: Sequence[Tensor], *, again: bool = False) -> None:
    """Make gradients of a traced layer and free them. `again`: backward can run once more."""
    with torch.autocast(out.device.type, enabled=False):  # as it is where the model calls its layers
        torch.autograd.grad(out, to, torch.empty_like(out), retain_graph=again, allow_unused=True)


def _first(tree: Any) -> Tensor:
    """The hidden states among the arguments of a traced layer, or its results."""
    return next(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _replaced(call: tuple[Any, Any], old: Tensor, new: Tensor) -> tuple[Any, Any]:
    args, kwargs = call
    return tuple(new if a is old else a for a in args), {k: new if v is old else v for k, v in kwargs.items()}
