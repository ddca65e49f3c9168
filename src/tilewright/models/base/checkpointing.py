"""Activation checkpointing of a layer: keep everything, keep expensive results, or recompute it whole.

The five modes give bitwise the same loss and gradients on a CPU; they trade memory for recomputation. With inputs kept
in 8 bits (`checkpoint_fp8_input`) the loss stays exact and gradients do not: the layer is recomputed from the rounded
input. Not the saving of runs to disk (`training.checkpoint.checkpoint_store`).

Legend: ... any leading dimensions  D width of the residual stream.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilewright.core.config.recipe import ActivationCheckpoint
from tilewright.formats.tiled import FP8_ROW
from tilewright.ops.base.compile import graph_limit, layer_options
from tilewright.ops.kernels import Kernels

_aten = torch.ops.aten
_ATTENTION_OPS = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
_PRODUCT_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_mm_v2.default,
    _aten.convolution.default,
)
_OWN_ATTENTION, _OWN_PRODUCTS = ("_attention",), ("_gemm", "_fprop")
"""How the names of tilewright's own end."""


def _policy(kept: Sequence[Any], endings: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """Keep the outputs of these operations, and of our own with these endings; selective checkpointing recomputes the
    rest."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        own = op.namespace == "tilewright" and op._opname.endswith(endings)
        return CheckpointPolicy.MUST_SAVE if own or op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


POLICIES = {
    "selective": _policy(_ATTENTION_OPS + _PRODUCT_OPS, _OWN_ATTENTION + _OWN_PRODUCTS),
    "matmuls": _policy(_PRODUCT_OPS, _OWN_PRODUCTS),
    "attention": _policy(_ATTENTION_OPS, _OWN_ATTENTION),
}
"""What is kept, by the modes that keep some results and not others."""
CONTEXTS = {mode: functools.partial(create_selective_checkpoint_contexts, kept) for mode, kept in POLICIES.items()}
"""`context_fn` of torch.utils.checkpoint, by the same modes. One object each, so that
compiled layers share their graph."""


def checkpoint_options(mode: ActivationCheckpoint) -> dict[str, Any]:
    """The arguments of torch's checkpoint function for a mode."""
    options: dict[str, Any] = {"use_reentrant": False}
    return options | {"context_fn": CONTEXTS[mode]} if mode in CONTEXTS else options


@functools.cache
def checkpoint_function(mode: ActivationCheckpoint) -> Callable[..., Any]:
    """torch's checkpoint function with these arguments: one object for all layers of a mode, so that compiled ones
    share their graph."""
    return functools.partial(checkpoint, **checkpoint_options(mode))


def silence_checkpoint_warning() -> None:
    """Silence torch's advice to have no in-place operation in a compiled layer that keeps selected results: ours have
    none, and the user could change nothing about it."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_advice)  # one object: added once


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


EXACT_INPUTS = (
    "Mixture-of-experts layers keep their exact inputs for recomputation, not 8-bit ones: rounded rows could be sent "
    "to other experts than in the forward pass."
)
"""A model's note where 8-bit inputs are asked for."""


def check_modes(modes: Sequence[ActivationCheckpoint], num_layers: int) -> None:
    """Refuse checkpointing modes that there are not.

    Raises:
        ValueError: one of them, or their number, is wrong.
    """
    for mode in modes:
        if mode not in get_args(ActivationCheckpoint):
            names = ", ".join(get_args(ActivationCheckpoint))
            raise ValueError(f"activation_checkpoint is one of {names}, not {mode!r}")
    if len(modes) != num_layers:
        raise ValueError(f"need a mode for each of {num_layers} layers, got {len(modes)}")


def common_mode(modes: Sequence[ActivationCheckpoint]) -> ActivationCheckpoint:
    """The common checkpointing mode of all layers.

    Raises:
        ValueError: they differ.

    Example:
        >>> common_mode(["full", "full"])
        'full'
    """
    if len(set(modes)) != 1:
        raise ValueError(f"the layers keep different things: read `checkpointing`, {tuple(modes)}")
    return modes[0]


def run_checkpointed(mode: ActivationCheckpoint, function: Callable[..., Any], *args: Any) -> Any:
    """Run with checkpointing: function(*args), keeping for backward what `mode` says. Random numbers (dropout) are the
    same ones again there.

    Inside a compiled layer the same call guides the compiler's own choice of what to save.

    Args:
        mode: what is kept.
        function, args: what is computed.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, **checkpoint_options(mode))


def checkpoint_fp8_input(kernels: Kernels, function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """Run function(x, *args), and keep for backward x in E4M3 with a scale for each 1x128 tile, and nothing else.

    The forward pass computes with x itself. Backward computes `function` again with x as decoded: what is linear in x
    (the residual path) has its exact gradient, the rest one at a point about 3 % of each element away.
    Stands outside of a compiled `function`.

    Args:
        kernels: implementations of the operations.
        function: chooses nothing by the values of x: both passes must save tensors of the same shapes.
        x: [..., D], any float dtype.
        args: passed on, kept as they are.

    Example:
        >>> x = torch.tensor([[1.0, 1.0625]], requires_grad=True)
        >>> out = checkpoint_fp8_input(Kernels.default(), torch.square, x)
        >>> out.sum().backward()
        >>> out.tolist(), x.grad.tolist()
        ([[1.0, 1.12890625]], [[2.0, 2.0]])
    """
    if not torch.is_grad_enabled():
        return function(x, *args)
    tiled = kernels.quantize(x.detach().reshape(-1, x.shape[-1]), FP8_ROW)
    exact = [x.detach()]  # until the first pass has taken it

    def run(edge: Tensor, *args: Any) -> Any:
        value = exact.pop() if exact else tiled.dequantize(edge.dtype).view(edge.shape)
        return function(_Value.apply(edge, value), *args)

    edge = _Edge.apply(x)
    return checkpoint(run, edge, *args, use_reentrant=False)


class _Edge(torch.autograd.Function):
    """A stand-in for x in the graph: its shape and dtype, its gradient, none of its memory."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class _Value(torch.autograd.Function):
    """Return `value`, whose gradient goes to `edge`, which stands for it in the graph."""

    @staticmethod
    def forward(ctx, edge: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Fp8Checkpoint:
    """`checkpoint_fp8_input` in the form in which transformers' layers call their checkpoint function.

    Args:
        kernels: implementations of the operations.
        note: called with a sentence where a layer's input cannot be kept in 8 bits.
    """

    def __init__(self, kernels: Kernels, note: Callable[[str], None]) -> None:
        self.compiles = False
        """Compile what is called."""
        self._kernels = kernels
        self._note = note
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a layer whose first argument, its input [..., D], is kept for backward in FP8."""
        if self.compiles:
            function = self._compile(function)
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return checkpoint_fp8_input(self._kernels, function, *args)
        self._note("A layer gets its input by name, so recomputation keeps it as it is, not in 8 bits.")
        return checkpoint(function, *args, use_reentrant=False)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile the layer's forward that checkpointing gets: transformers makes a new partial of it at each call."""
        part = function if isinstance(function, functools.partial) else functools.partial(function)
        if part.func not in self._compiled:
            self._compiled[part.func] = torch.compile(part.func, options=layer_options(), **graph_limit())
        return functools.partial(self._compiled[part.func], *part.args, **part.keywords)
