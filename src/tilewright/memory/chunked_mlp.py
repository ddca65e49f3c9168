"""MLPs computed some tokens at a time: the wide hidden values of one chunk are alive, in forward and in backward.

`chunk_mlps(model, chunks)` finds the token-wise MLPs of a model, by the names that models give them, and changes how
they run; `chunk_layers` does it with a number for each layer. Their parameters and names stay what they were. A chunked
MLP is an autograd function of the tokens and the weights: each weight gets one gradient, summed in FP32 over the
chunks, so hooks of DDP and FSDP see what they always see. Backward computes a chunk again, then its gradient. It may be
inside of a layer that is itself recomputed.

Equal to the whole MLP up to the order of sums; dropout draws other numbers, chunk by chunk, and the same ones in both
passes.

Legend: N tokens of a call  D width.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tilewright.formats.tiled import WithCopies
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.routers import find_routers
from tilewright.ops.base.compile import layer_options
from tilewright.precision.mixed.autocast import Fp32Functions
from tilewright.precision.snapshot import drawing, torch_states

NAMES = ("mlp", "ffn", "feed_forward", "feedforward")
"""What MLPs are called."""
_ALIGN = 128
"""Chunks are whole multiples of this, where they are as large: tokens that share a scale stay together."""
_MAX_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of a token computed alone and with others, against the largest output. Else 2^-6: sums in another order, rounded to
16 bit twice or thrice."""


def chunk_mlps(model: nn.Module, chunks: int, note: Callable[[str], None], *, compile: bool = False) -> list[str]:
    """Make a model's MLPs run in chunks.

    Args:
        model: with its layers as they will train (`precision.convert` first).
        chunks: into how many a call's tokens are cut.
        note: told what cannot be chunked, when that is found out.
        compile: compile what a chunk computes. (What is compiled around it breaks there.)

    Returns:
        Names of the modules. Whether one of them really treats each token alone is tried at its first call, once for
        each class; one that does not runs whole.

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
    """The same, each layer's MLP with a number of its own; see `chunk_mlps`.

    Args:
        layers: of one model.
        chunks: for each of them; 1 leaves it as it is.
        note: see there.
        compile: see there.
    """
    parts = [(f"{index}.", layer, number) for index, (layer, number) in enumerate(zip(layers, chunks, strict=True))]
    return _cut([part for part in parts if part[2] > 1], note, compile)


def _cut(parts: Sequence[tuple[str, nn.Module, int]], note: Callable[[str], None], compile: bool) -> list[str]:
    """Cut what is in these (prefix of names, module, chunks); the names."""
    found: list[str] = []
    experts: list[str] = []
    verdicts: dict[type[nn.Module], str | None] = {}
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
            module.chunking = _Chunking(chunks, note, type(module), compile, verdicts)
            module.__class__ = _chunked(type(module))
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
    verdicts: dict[type[nn.Module], str | None]
    """Class -> why its modules run whole, None where they do not. Shared by the modules of a model."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for these arguments."""
        whole = functools.partial(_compiled(self.plain) if self.compile else self.plain.forward, module)
        if self.plain not in self.verdicts:
            self.verdicts[self.plain] = why = self._why_not(module, whole, args, kwargs)
            if why is not None:
                self.note(f"{self.plain.__name__} is not cut into chunks: {why}.")
        if self.verdicts[self.plain] is not None or kwargs:
            return whole(*args, **kwargs)
        return run_chunked(whole, args[0], self.chunks, module)

    def _why_not(
        self, module: nn.Module, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """None where the outputs of three tokens are those of each computed without the others."""
        if len(args) != 1 or kwargs or not isinstance(_value(args[0]), Tensor):
            return "it takes more than its tokens"
        x = _value(args[0]).detach()
        x = x.reshape(*(1,) * (x.ndim - 2), -1, x.shape[-1])[..., :3, :]
        with torch.no_grad(), evaluation(module):
            together = whole(x)
            if not isinstance(together, Tensor) or together.shape[:-1] != x.shape[:-1]:
                return "its result is not one row per token"
            alone = torch.cat([whole(part) for part in x.split((1, x.shape[-2] - 1), dim=-2)], dim=-2)
        difference = (together.double() - alone.double()).abs().max() / together.double().abs().max().clamp_min(1e-30)
        if difference > _MAX_DIFFERENCE.get(together.dtype, 2**-6):
            return f"a token's result depends on the others (by {float(difference):.1e} of the largest)"
        return None


@functools.cache
def _compiled(plain: type[nn.Module]) -> Callable[..., Tensor]:
    """A class' forward, compiled; modules of one class share the graph."""
    return torch.compile(plain.forward, options=layer_options())


class _Chunked:
    """Marks the classes made by `_chunked`; copies and pickles by naming the plain class."""

    plain: type[nn.Module]

    def __reduce_ex__(self, protocol: int):
        return _rebuild, (self.plain,), self.__dict__


@functools.cache
def _chunked(plain: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(plain.forward)
    def forward(self, *args, **kwargs):
        return self.chunking.run(self, args, kwargs)

    names = {"plain": plain, "forward": torch.compiler.disable(forward), "__module__": plain.__module__}
    return type(plain.__name__, (_Chunked, plain), names | {"__doc__": plain.__doc__})


def _rebuild(plain: type[nn.Module]) -> nn.Module:
    cls = _chunked(plain)
    return cls.__new__(cls)


def run_chunked(function: Callable[[Tensor], Tensor], x: Tensor | WithCopies, chunks: int, module: nn.Module) -> Tensor:
    """function(x), some tokens at a time.

    Args:
        function: token-wise: [..., D] -> [..., any].
        x: [..., D]; of a value with 8-bit copies the value, for each chunk makes its own, which are the same.
        chunks: how many; fewer where they would be small and not whole multiples of 128 tokens.
        module: whose parameters `function` reads. Those that are trained get one gradient each, in FP32 at least.
    """
    x = _value(x)
    rows_ND = x.reshape(*(1,) * (x.ndim - 2), -1, x.shape[-1])
    size = -(-rows_ND.shape[-2] // chunks)
    if size > _ALIGN:
        size = -(-size // _ALIGN) * _ALIGN
    if size >= rows_ND.shape[-2]:
        return function(x)
    params = [param for param in module.parameters() if param.requires_grad]
    out = _ChunkedFunction.apply(function, size, module.training, rows_ND, *params)
    return out.view(*x.shape[:-1], out.shape[-1])


class _ChunkedFunction(torch.autograd.Function):
    """Outputs of all chunks; nothing of a chunk is kept."""

    @staticmethod
    def forward(ctx, function, size, draws, rows_ND, *params):
        ctx.function, ctx.size = function, size
        ctx.surroundings = _Surroundings.now(rows_ND.device, draws)
        ctx.save_for_backward(rows_ND, *params)
        return _fill(rows_ND, size, function)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        rows_ND, *params = ctx.saved_tensors
        wants_rows = ctx.needs_input_grad[3]
        sums: list[Tensor | None] = [None] * len(params)

        def chunk_gradient(rows: Tensor, drows: Tensor) -> Tensor:
            leaf = rows.detach().requires_grad_(wants_rows)
            with torch.enable_grad():
                out = ctx.function(leaf)
            grads = torch.autograd.grad(out, [*([leaf] if wants_rows else []), *params], drows, allow_unused=True)
            _add(sums, grads[1:] if wants_rows else grads)
            return grads[0] if wants_rows and grads[0] is not None else rows.new_zeros(rows.shape)

        with ctx.surroundings.again():
            drows_ND = _fill(rows_ND, ctx.size, chunk_gradient, dout)
        return None, None, None, drows_ND if wants_rows else None, *sums


def _fill(rows_ND: Tensor, size: int, function: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """function(chunk of rows, chunks of others) of all chunks, put together."""
    out, start = None, 0
    for parts in zip(*(tensor.split(size, dim=-2) for tensor in (rows_ND, *others)), strict=True):
        part = function(*parts)
        if out is None:
            out = part.new_empty(*rows_ND.shape[:-1], part.shape[-1])
        out[..., start : start + size, :] = part
        start += size
    return out


def _add(sums: list[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    """Add a chunk's gradients in FP32 at least."""
    for place, grad in enumerate(grads):
        if grad is not None:
            high = torch.promote_types(grad.dtype, torch.float32)
            sums[place] = grad.to(high) if sums[place] is None else sums[place].add_(grad)


@dataclass(frozen=True)
class _Surroundings:
    """What decides how a function computes in addition to its arguments: autocast, functions kept in FP32, random
    states."""

    device: torch.device
    autocast: tuple[bool, torch.dtype, bool]
    modes: tuple[Fp32Functions, ...]
    states: Mapping[str, Tensor]

    @classmethod
    def now(cls, device: torch.device, draws: bool) -> "_Surroundings":
        """Those of this moment; random states only where something may be drawn."""
        kind = device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        modes = tuple(mode for mode in _get_current_function_mode_stack() if isinstance(mode, Fp32Functions))
        return cls(device, autocast, modes, torch_states(device) if draws else {})

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, everything is as it was then; afterwards the generators are as they were before."""
        enabled, dtype, cached = self.autocast
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=cached))
            for mode in self.modes:
                stack.enter_context(mode)
            stack.enter_context(drawing(self.states))
            yield


def _value(x: Any) -> Any:
    return x.value if isinstance(x, WithCopies) else x
