"""What one layer keeps, needs and computes, found by running it alone, forward and backward, on fake tensors.

The model is run once as a whole, so that each layer gets the arguments that it would get; a hook measures the layer
where it stands, inside whatever its model wraps around it.

Legend: B rows  S positions.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tilewright.models.base.checkpointing import CONTEXTS
from tilewright.planner.trace.byte_counter import GemmKind, LiveBytes, flop_counter

MLP_NAME = re.compile(r"mlp|feed_forward|ffn|block_sparse_moe")
"""What the part of a layer is called that looks at each token for itself."""


@dataclass(frozen=True)
class TracedLayer:
    """One layer and one micro-batch, in bytes and in FLOPs of a forward pass.

    `kept`, `kept_selective`, `kept_matmuls`, `kept_attention`: from forward to backward, its input among them, its
    output not; with all kept, with results of matmuls and attention, of one of them alone. `input`: of its input.
    `work`: most that backward has alive beyond `kept`, gradients of weights left out. `moved`: read and written by
    what is neither matmul nor attention, forward and backward; `fresh`: of that, written into new memory.
    `operations`: calls, forward and backward. `mlp_kept`, `mlp_work`: kept and needed by its token-wise part alone; 0
    where none was found. `gemms`: calls and FLOPs of matrix matmuls, linear layers by their names in the layer.
    `last_matmuls`: FLOPs of those at its end that recomputation does not run again. `mlp_matmuls`: of its token-wise
    part's. `attention`: fused attention, all pairs of positions.
    """

    kept: int
    kept_selective: int
    kept_matmuls: int
    kept_attention: int
    input: int
    work: int
    moved: int
    fresh: int
    operations: int
    mlp_kept: int
    mlp_work: int
    gemms: Mapping[GemmKind, tuple[int, float]]
    last_matmuls: float
    mlp_matmuls: float
    attention: float

    @property
    def matmuls(self) -> float:
        """FLOPs of all matrix matmuls."""
        return flops_of(self.gemms)


def trace_layers(layers: Sequence[nn.Module], run: Callable[[], object]) -> list[TracedLayer]:
    """Measure each layer while `run` passes through all of them. Needs fake tensors all around.

    Raises:
        ValueError: a layer that does not run.
    """
    found: dict[int, TracedLayer] = {}
    busy = []

    def measure(layer: nn.Module, args: Any, kwargs: Any) -> None:
        if not busy:  # the measurement calls the layer too
            busy.append(layer)
            found[id(layer)] = _trace_layer(layer, args, kwargs)
            busy.pop()

    handles = [layer.register_forward_pre_hook(measure, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    if len(found) < len(layers):
        raise ValueError("a layer of the model's list does not run")
    return [found[id(layer)] for layer in layers]


def _trace_layer(layer: nn.Module, args: Any, kwargs: Any) -> TracedLayer:
    mlp, call = _mlp_call(layer, args, kwargs)
    kept, whole = _kept_and_work(layer, args, kwargs)
    kept_selective, kept_matmuls, kept_attention = (
        _kept_and_work(_Checkpointed(layer, CONTEXTS[mode]), args, kwargs, backward=False)[0]
        for mode in ("selective", "matmuls", "attention")
    )
    _, trained = _kept_and_work(layer, args, kwargs, parameters=[p for p in layer.parameters() if p.requires_grad])
    counted = _counted(layer, args, kwargs)
    matmuls, attention = flops_of(counted.gemms), counted.attention
    again = _trained_flops(_Checkpointed(layer), args, kwargs) - _trained_flops(layer, args, kwargs)
    mlp_kept, mlp_work, mlp_matmuls = 0, 0, 0.0
    if mlp is not None:
        mlp_kept, ran = _kept_and_work(mlp, *call)
        mlp_work = ran.peak - mlp_kept
        mlp_kept = max(0, mlp_kept - _first(call[0]).nbytes)  # its output leaves; its input is the norm's
        mlp_matmuls = flops_of(_counted(mlp, *call).gemms)
    return TracedLayer(
        kept=kept,
        kept_selective=kept_selective,
        kept_matmuls=kept_matmuls,
        kept_attention=kept_attention,
        input=_first((args, kwargs)).nbytes,
        work=whole.peak - kept,
        moved=trained.moved,
        fresh=trained.fresh,
        operations=trained.operations,
        mlp_kept=mlp_kept,
        mlp_work=mlp_work,
        gemms=dict(counted.gemms),
        last_matmuls=max(0.0, matmuls + attention - again),
        mlp_matmuls=mlp_matmuls,
        attention=attention,
    )


class _Checkpointed:
    """A layer that is recomputed, but for what a `context_fn` keeps of it."""

    def __init__(self, layer: nn.Module, context_fn: Callable[[], Any] = noop_context_fn) -> None:
        self.layer = layer
        self.context_fn = context_fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False, context_fn=self.context_fn, **kwargs)


def _mlp_call(layer: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module | None, tuple[Any, Any]]:
    """The token-wise part of a layer, and what it is called with."""
    mlp = next((child for name, child in layer.named_children() if MLP_NAME.search(name)), None)
    calls: list[tuple[Any, Any]] = []
    if mlp is None:
        return None, ((), {})
    handle = mlp.register_forward_pre_hook(lambda _, a, k: calls.append((a, k)), with_kwargs=True)
    layer(*args, **kwargs)
    handle.remove()
    return (mlp, calls[0]) if calls else (None, ((), {}))


@torch.enable_grad()
def _kept_and_work(
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    backward: bool = True,
    parameters: Sequence[nn.Parameter] = (),
) -> tuple[int, LiveBytes]:
    """Bytes alive after forward, its output counted as its input would be; what was counted, the peak of backward.

    `parameters`: whose gradients backward makes in addition to that of the input.
    """
    first = _first((args, kwargs))
    edge = first.detach().requires_grad_()
    args, kwargs = _replaced((args, kwargs), first, edge)
    live = LiveBytes()
    with live:
        out = _first(run(*args, **kwargs))
        kept = live.live
        live.peak, live.in_backward = kept, True
        if backward:
            with torch.autocast(out.device.type, enabled=False):  # as it is where the model calls its layers
                torch.autograd.grad(out, [edge, *parameters], torch.empty_like(out), allow_unused=True)
    return kept, live


@torch.no_grad()
def _counted(module: nn.Module, args: Any, kwargs: Any) -> LiveBytes:
    """What a forward pass computes."""
    live = LiveBytes()
    with live.watching(module), live:
        module(*args, **kwargs)
    return live


def flops_of(gemms: Mapping[GemmKind, tuple[int, float]]) -> float:
    """FLOPs of all kinds together."""
    return sum(flops for _, flops in gemms.values())


@torch.enable_grad()
def _trained_flops(run: Callable[..., Any], args: Any, kwargs: Any) -> float:
    """FLOPs of a forward pass, and of a backward pass to the layer's input."""
    first = _first((args, kwargs))
    edge = first.detach().requires_grad_()
    args, kwargs = _replaced((args, kwargs), first, edge)
    torch.clear_autocast_cache()  # copies of weights that are there already are not made, and then missed in backward
    counter = flop_counter()
    with counter:
        out = _first(run(*args, **kwargs))
        out.backward(torch.empty_like(out), inputs=[edge])
    return float(counter.get_total_flops())


def _first(tree: Any) -> Tensor:
    """The hidden states among the arguments of a layer, or its results."""
    return next(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _replaced(call: tuple[Any, Any], old: Tensor, new: Tensor) -> tuple[Any, Any]:
    args, kwargs = call
    return tuple(new if a is old else a for a in args), {k: new if v is old else v for k, v in kwargs.items()}
