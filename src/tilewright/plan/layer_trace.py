"""What one layer keeps, needs and computes, found by running it alone, forward and backward, on fake tensors.

The model is run once as a whole, so that each layer gets the arguments that it would get; a hook measures the layer
where it stands, inside whatever its model wraps around it. Called by `plan.classes`.

Legend: B rows  S positions.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tilewright.models.activation import CONTEXTS
from tilewright.plan.live_bytes import ATTENTION, LiveBytes, flop_counter

MLP_NAME = re.compile(r"mlp|feed_forward|ffn|block_sparse_moe")
"""What the part of a layer is called that looks at each token for itself."""


@dataclass(frozen=True)
class TracedLayer:
    """One layer and one micro-batch, in bytes and in FLOPs of a forward pass.

    `kept`, `kept_selective`, `kept_products`, `kept_attention`: from forward to backward, its input among them, its
    output not; with all kept, with results of products and attention, of one of them alone. `input`: of its input.
    `work`: most that backward has alive beyond `kept`, gradients of weights left out. `moved`: read and written by
    what is neither product nor attention, forward and backward. `mlp_kept`, `mlp_work`: kept and needed by its
    token-wise part alone; 0 where none was found. `products`, `mlp_products`: matrix products. `last_products`: of them
    those at its end that recomputation does not run again. `attention`: fused attention, all pairs of positions.
    """

    kept: int
    kept_selective: int
    kept_products: int
    kept_attention: int
    input: int
    work: int
    moved: int
    mlp_kept: int
    mlp_work: int
    products: float
    last_products: float
    mlp_products: float
    attention: float


def trace_layers(layers: Sequence[nn.Module], run: Callable[[], object]) -> list[TracedLayer]:
    """Measure each layer while `run` passes through all of them. Needs fake tensors all around."""
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
    return [found[id(layer)] for layer in layers]


def _trace_layer(layer: nn.Module, args: Any, kwargs: Any) -> TracedLayer:
    mlp, call = _mlp_call(layer, args, kwargs)
    kept, work, moved = _kept_and_work(layer, args, kwargs)
    kept_selective, kept_products, kept_attention = (
        _kept_and_work(_Checkpointed(layer, CONTEXTS[mode]), args, kwargs, backward=False)[0]
        for mode in ("selective", "products", "attention")
    )
    products, attention = _flops(layer, args, kwargs)
    again = _trained_flops(_Checkpointed(layer), args, kwargs) - _trained_flops(layer, args, kwargs)
    mlp_kept, mlp_work, mlp_products = 0, 0, 0.0
    if mlp is not None:
        mlp_kept, mlp_work, _ = _kept_and_work(mlp, *call)
        mlp_kept = max(0, mlp_kept - _first(call[0]).nbytes)  # its output leaves; its input is the norm's
        mlp_products, _ = _flops(mlp, *call)
    return TracedLayer(
        kept=kept,
        kept_selective=kept_selective,
        kept_products=kept_products,
        kept_attention=kept_attention,
        input=_first((args, kwargs)).nbytes,
        work=work,
        moved=moved,
        mlp_kept=mlp_kept,
        mlp_work=mlp_work,
        products=products,
        last_products=max(0.0, products + attention - again),
        mlp_products=mlp_products,
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
def _kept_and_work(run: Callable[..., Any], args: Any, kwargs: Any, *, backward: bool = True) -> tuple[int, int, int]:
    """Bytes alive after forward, its output counted as its input would be; what backward adds at most; what moves."""
    first = _first((args, kwargs))
    edge = first.detach().requires_grad_()
    args, kwargs = _replaced((args, kwargs), first, edge)
    live = LiveBytes()
    with live:
        out = _first(run(*args, **kwargs))
        kept = live.live
        live.peak = kept
        if backward:
            torch.autograd.grad(out, [edge], torch.empty_like(out))
    return kept, live.peak - kept, live.moved


def _flops(run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[float, float]:
    """FLOPs of a forward pass: in products, and in fused attention."""
    counter = flop_counter()
    with torch.no_grad(), counter:
        run(*args, **kwargs)
    counts = counter.get_flop_counts().get("Global", {})
    attention = sum(count for op, count in counts.items() if op in ATTENTION)
    return counter.get_total_flops() - attention, attention


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
