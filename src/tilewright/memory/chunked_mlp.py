"""MLPs computed some tokens at a time: the wide hidden values of one chunk are alive, in forward and in backward.

`chunk_mlps(model, chunks)` finds the token-wise MLPs of a model, by the names that models give them, and changes how
they run; `chunk_layers` does it with a number for each layer. Their parameters and names stay what they were. A chunked
MLP is an autograd function of the tokens and the weights: each weight gets one gradient, summed in FP32 over the
chunks, so hooks of DDP and FSDP see what they always see. Backward computes a chunk again, then its gradient. It may be
inside of a layer that is itself recomputed.

Equal to the whole MLP up to the order of sums; dropout draws other numbers, chunk by chunk, and the same ones in both
passes. What ties tokens to each other (`token_wise`) runs whole. Backward computes with the tensors that forward had,
also where `functional_call` had put others in the place of parameters; inside of a `torch.func` transform MLPs run
whole.

Legend: N tokens of a call  D width.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tilewright.formats.tiled import WithCopies
from tilewright.memory.token_wise import TRIED, why_not_token_wise
from tilewright.models.base.routers import find_routers
from tilewright.ops.base.compile import graph_limit, layer_options
from tilewright.ops.base.transforms import in_func_transform
from tilewright.ops.base.weight_gradient_queue import queues_of
from tilewright.precision.mixed.autocast import Fp32Functions
from tilewright.precision.mixed.derived import Derived, derive
from tilewright.precision.snapshot import drawing, torch_states

_log = logging.getLogger(__name__)

NAMES = ("mlp", "ffn", "feed_forward", "feedforward")
"""Names of MLPs in models."""
_ALIGN = 128
"""Chunks are whole multiples of this, where they are as large: tokens that share a scale stay together."""


def chunk_mlps(model: nn.Module, chunks: int, note: Callable[[str], None], *, compile: bool = False) -> list[str]:
    """Make the MLPs of a model run in chunks of tokens.

    Args:
        model: with its layers as they will train (`precision.convert` first).
        chunks: into how many a call's tokens are cut.
        note: told what cannot be chunked, when that is found out.
        compile: compile what a chunk computes. (What is compiled around it breaks there.)

    Returns:
        Names of the modules. Whether one of them really treats each token alone is tried at its first call of some
        tokens, in training and in evaluation; one that does not runs whole.

    Example:
        >>> layer = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))})
        >>> whole = layer["mlp"](torch.ones(2, 6, 4))
        >>> chunk_mlps(layer, 3, print), torch.allclose(layer["mlp"](torch.ones(2, 6, 4)), whole)
        (['mlp'], True)
    """
    return _cut([("", model, chunks)], note, compile)


def chunk_layers(
    layers: Sequence[nn.Module], chunks: Sequence[int], note: Callable[[str], None], *, compile: bool = False
) -> list[str]:
    """Run the MLPs of layers on a few tokens at a time, as `chunk_mlps` does, each layer's with its own number of
    chunks.

    Args:
        layers: of one model.
        chunks: for each of them; 1 leaves it as it is.
        note: see there.
        compile: see there.
    """
    parts = [(f"{index}.", layer, number) for index, (layer, number) in enumerate(zip(layers, chunks, strict=True))]
    return _cut([part for part in parts if part[2] > 1], note, compile)


def is_chunked(module: nn.Module) -> bool:
    """True if a module is a chunked MLP, which `chunk_mlps` found."""
    return isinstance(module, _Chunked)


def _cut(parts: Sequence[tuple[str, nn.Module, int]], note: Callable[[str], None], compile: bool) -> list[str]:
    """Cut MLPs into chunks that are in these (prefix of names, module, chunks); the names."""
    found: list[str] = []
    experts: list[str] = []
    told: set[str] = set()
    modules = [
        (prefix + name, module, chunks) for prefix, part, chunks in parts for name, module in part.named_modules()
    ]
    for name, module, chunks in modules:
        if name.rpartition(".")[2] not in NAMES or isinstance(module, nn.ModuleList | _Chunked):
            continue
        if next(find_routers(module), None) is not None:
            experts.append(name)
        elif "forward" in vars(module):
            note(f"{name} is not cut into chunks: another tool has replaced its forward.")
        else:
            derive(module, _chunked)
            assert isinstance(module, _Chunked)
            module.chunking = _Chunking(chunks, note, module.plain, compile, told)
            found.append(name)
    if experts:
        note(f"memory.mlp_chunks leaves mixtures of experts whole ({experts[0]} and {len(experts) - 1} more).")
    if parts and not found:
        note(f"memory.mlp_chunks has no effect: no dense module is called {', '.join(NAMES)}.")
    return found


@dataclass
class _Chunking:
    """How one module is cut."""

    chunks: int
    note: Callable[[str], None]
    plain: type[nn.Module]
    compile: bool
    told: set[str]
    """Notes so far. Shared by the modules of a model."""
    verdicts: dict[tuple[bool, ...], str | None] = field(default_factory=dict)
    """Which parts are in training -> why the module runs whole, None where it does not."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a chunked MLP: the module's output for these arguments."""
        plain = functools.partial(self.plain.forward, module)
        if in_func_transform() or self._why_not(module, plain, args, kwargs) is not None:
            return plain(*args, **kwargs)
        whole = functools.partial(_compiled(self.plain), module) if self.compile else plain
        return run_chunked(whole, args[0], self.chunks, module)

    def _why_not(
        self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        if len(args) != 1 or kwargs or not isinstance(_value(args[0]), Tensor):
            return self._tell("it takes more than its tokens")
        modes = tuple(part.training for part in module.modules())
        if modes not in self.verdicts:
            x = _value(args[0])
            if x.numel() < TRIED * x.shape[-1]:
                return "too few tokens to try it"
            self.verdicts[modes] = why_not_token_wise(module, plain, x)
        why = self.verdicts[modes]
        return None if why is None else self._tell(why)

    def _tell(self, why: str) -> str:
        """Note once for each class of chunked MLP and reason, without the numbers in it."""
        text = f"{self.plain.__name__} is not cut into chunks: {why}."
        if (key := text.partition(" (")[0]) not in self.told:
            self.told.add(key)
            self.note(text)
        return why

    def __getstate__(self) -> dict[str, Any]:
        """The state of a chunked MLP that is pickled: the function that it reports to belongs to this process."""
        return vars(self) | {"note": _log.info}


@functools.cache
def _compiled(plain: type[nn.Module]) -> Callable[..., Tensor]:
    """The forward of a chunked MLP's class, compiled; modules of one class share the graph."""
    return torch.compile(plain.forward, options=layer_options(), **graph_limit())


class _Chunked(Derived):
    """Marks the classes made by `_chunked`."""

    chunking: "_Chunking | None" = None


@functools.cache
def _chunked(plain: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(plain.forward)
    def forward(self, *args, **kwargs):
        return plain.forward(self, *args, **kwargs) if self.chunking is None else self.chunking.run(self, args, kwargs)

    names = {"plain": plain, "made_by": _chunked, "forward": torch.compiler.disable(forward)}
    names |= {"__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Chunked, plain), names)


def run_chunked(function: Callable[[Tensor], Tensor], x: Tensor | WithCopies, chunks: int, module: nn.Module) -> Tensor:
    """Run function(x) of an MLP on a chunk of tokens at a time.

    Args:
        function: token-wise: [..., D] -> [..., any].
        x: [..., D]; of a value with 8-bit copies the value, for each chunk makes its own, which are the same.
        chunks: how many; fewer where they would be small and not whole multiples of 128 tokens.
        module: whose tensors `function` reads. Parameters that are trained get one gradient each, in FP32 at least.
    """
    value: Tensor = _value(x)
    rows_ND = value.reshape(*(1,) * (value.ndim - 2), value.shape[:-1].numel(), value.shape[-1])
    size = -(-rows_ND.shape[-2] // chunks)
    if size > _ALIGN:
        size = -(-size // _ALIGN) * _ALIGN
    if size >= rows_ND.shape[-2]:
        return function(value)
    held = _Held.of(module)
    out = _ChunkedFunction.apply(function, size, module.training, held, rows_ND, *held.trained)
    return out.view(*value.shape[:-1], out.shape[-1])


@dataclass(frozen=True)
class _Held:
    """The tensors that a module held at some time. Under `functional_call` they are not the module's own."""

    module: nn.Module
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "_Held":
        """The tensors that a chunked MLP holds now, each once."""
        return cls(module, {**dict(module.named_parameters()), **dict(module.named_buffers())})

    @property
    def trained(self) -> list[Tensor]:
        """The held tensors of a chunked MLP that get gradients."""
        return [tensor for tensor in self.tensors.values() if tensor.requires_grad]

    def with_trained(self, trained: Sequence[Tensor]) -> "_Held":
        """These tensors of a chunked MLP with others in the places of `trained`."""
        others = iter(trained)
        tensors = {name: next(others) if held.requires_grad else held for name, held in self.tensors.items()}
        return _Held(self.module, tensors)

    def call(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Call function(x), which reads a chunked MLP's module, with these tensors in it."""
        now = _Held.of(self.module).tensors
        if all(now.get(name) is tensor for name, tensor in self.tensors.items()):
            return function(x)
        tensors = {f"module.{name}": tensor for name, tensor in self.tensors.items()}
        return torch.func.functional_call(_Reader(self.module, function), tensors, (x,))


class _Reader(nn.Module):
    """A function of one argument that reads a module."""

    def __init__(self, module: nn.Module, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _ChunkedFunction(torch.autograd.Function):
    """Outputs of all chunks; nothing of a chunk is kept."""

    @staticmethod
    def forward(ctx, function, size, draws, held, rows_ND, *params):
        ctx.function, ctx.size, ctx.held = function, size, held
        ctx.surroundings = _Surroundings.now(rows_ND.device, draws)
        ctx.save_for_backward(rows_ND, *params)
        return _fill(rows_ND, size, function)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        rows_ND, *params = ctx.saved_tensors
        wants_rows = ctx.needs_input_grad[4]
        if any(not param.is_leaf for param in params):  # computed by others: gradients end here
            params = [param.detach().requires_grad_() for param in params]
        held = ctx.held.with_trained(params)
        sums: list[Tensor | None] = [None] * len(params)

        def chunk_gradient(rows: Tensor, drows: Tensor) -> Tensor:
            leaf = rows.detach().requires_grad_(wants_rows)
            with torch.enable_grad():
                out = held.call(ctx.function, leaf)
            grads = torch.autograd.grad(out, [*([leaf] if wants_rows else []), *params], drows, allow_unused=True)
            _add(sums, grads[1:] if wants_rows else grads)
            return grads[0] if wants_rows and grads[0] is not None else rows.new_zeros(rows.shape)

        with ctx.surroundings.again(), ExitStack() as stack:
            for queue in queues_of(ctx.held.module):  # weight gradients are summed here
                stack.enter_context(queue.paused())
            drows_ND = _fill(rows_ND, ctx.size, chunk_gradient, dout)
        return *[None] * 4, drows_ND if wants_rows else None, *sums


def _fill(rows_ND: Tensor, size: int, function: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """Fill the result of a chunked MLP with function(chunk of rows, chunks of others) of all chunks."""
    out, start = None, 0
    for parts in zip(*(tensor.split(size, dim=-2) for tensor in (rows_ND, *others)), strict=True):
        part = function(*parts)
        if out is None:
            out = part.new_empty(*rows_ND.shape[:-1], part.shape[-1])
        out[..., start : start + size, :] = part
        start += size
    assert out is not None, "there are rows"
    return out


def _add(sums: list[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    """Add the gradients of an MLP's chunk in FP32 at least."""
    for place, grad in enumerate(grads):
        if grad is not None:
            high = torch.promote_types(grad.dtype, torch.float32)
            held = sums[place]
            sums[place] = grad.to(high) if held is None else held.add_(grad)


@dataclass(frozen=True)
class _Surroundings:
    """Settings around a call that change how a function computes: autocast, functions kept in FP32, random
    states."""

    device: torch.device
    autocast: tuple[bool, torch.dtype, bool]
    modes: tuple[Fp32Functions, ...]
    states: Mapping[str, Tensor]

    @classmethod
    def now(cls, device: torch.device, draws: bool) -> "_Surroundings":
        """Record the surroundings of a chunked MLP at this moment; random states only if something may be drawn."""
        kind = device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        modes = tuple(mode for mode in _get_current_function_mode_stack() if isinstance(mode, Fp32Functions))
        return cls(device, autocast, modes, torch_states(device) if draws else {})

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the surroundings of a chunked MLP inside the context; afterwards the generators are as they were
        before."""
        enabled, dtype, cached = self.autocast
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=cached))
            for mode in self.modes:
                stack.enter_context(mode)
            stack.enter_context(drawing(self.states))
            yield


def _value(x: Any) -> Any:
    return x.value if isinstance(x, WithCopies) else x
