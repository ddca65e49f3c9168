"""Formats of what is not a layer of torch's: functions that a forward calls, and modules of another party.

A `Region` is around one module's forward. It switches autocast for the functions called inside (attention, matmul
on parameters), keeps chosen functions in FP32, and casts what goes in and comes out. tilewright's own decoder needs
none of it: its operations follow their input's dtype.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tilewright.core.errors import ConfigError
from tilewright.ops.base.transforms import in_func_transform
from tilewright.precision.mixed.derived import Derived, derive
from tilewright.precision.mixed.own_attention import own_attention, taken_call

LOW_DTYPES = (torch.float16, torch.bfloat16)

FUNCTIONS = {
    "softmax": (torch.softmax, Tensor.softmax, F.softmax),
    "log_softmax": (torch.log_softmax, Tensor.log_softmax, F.log_softmax),
    "cross_entropy": (F.cross_entropy, F.nll_loss),
    "silu": (F.silu,),
    "gelu": (F.gelu,),
    "matmul": (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm),
    "sum": (torch.sum, Tensor.sum),
    "mean": (torch.mean, Tensor.mean),
    "attention": (F.scaled_dot_product_attention,),
    "norm": (F.layer_norm, F.rms_norm, F.group_norm),
    "batch_norm": (F.batch_norm,),
}
"""Entries of a policy's `fp32_ops`, and the functions they mean. `policy.KIND_OPS` gives the names of the norms."""


_MATMULS = frozenset(FUNCTIONS["matmul"])
PRODUCTS = frozenset(
    (
        *FUNCTIONS["matmul"],
        *FUNCTIONS["attention"],
        *(torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addbmm, Tensor.addbmm, Tensor.__rmatmul__),
        *(
            torch.mv,
            Tensor.mv,
            torch.addmv,
            Tensor.addmv,
            torch.dot,
            Tensor.dot,
            torch.inner,
            Tensor.inner,
            torch.einsum,
        ),
        *(torch.tensordot, torch.chain_matmul, torch.linalg.multi_dot, F.linear, F.bilinear, F.grouped_mm),
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(torch.conv1d, torch.conv2d, torch.conv3d, torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu),
        *(F.multi_head_attention_forward, torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd),
    )
)
"""Functions that multiply matrices or convolve."""


class Fp32Functions(TorchFunctionMode):
    """Runs the named functions on FP32 copies of their 16-bit tensors, autocast off; the result is 16-bit again.

    Losses stay FP32, and so does a result whose dtype the caller asked for.

    Args:
        names: in `FUNCTIONS`.
        widens: whether matmuls of 16-bit operands, or of operands that autocast would round, get these operands in
            FP32. Autograd keeps those of linear layers and plain matmuls in 16 bits, all others in FP32.
        attention: kernel in C++ that attention goes to where it takes the call, see `own_attention`.
    """

    def __init__(self, names: frozenset[str], *, widens: bool = False, attention: str | None = None):
        super().__init__()
        self.names = names
        self.functions = {function: name for name in names for function in FUNCTIONS[name]}
        self.widens = widens
        self.attention = attention

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = self.functions.get(func)
        if name is None and self.attention is not None and func is F.scaled_dot_product_attention:
            taken = taken_call(*args, **kwargs)
            if taken is not None:
                return own_attention(self.attention, taken)
        if name is None and (not self.widens or func not in PRODUCTS or kwargs.get("out") is not None):
            return func(*args, **kwargs)
        low = _low_dtype((args, kwargs), autocast=name is None)
        if low is None:
            return func(*args, **kwargs)
        device, dtype = low
        if name is None:  # rounded first, as the matmul would do it
            args, kwargs = _cast(args, dtype), _cast(dict(kwargs), dtype)
            run = _compact(func, args, kwargs)
            if run is not None:
                return run(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            out = func(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))
        return out if name == "cross_entropy" or kwargs.get("dtype") is not None else _cast(out, dtype, torch.float32)


def _compact(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The function that multiplies these 16-bit operands in FP32 on a CPU and saves them in 16 bits for backward; None
    for most functions."""
    if in_func_transform():  # what is made of torch's own operations takes any transform
        return None
    if func is not F.linear and (func not in _MATMULS or kwargs or min(t.ndim for t in args) < 2):
        return None
    from tilewright.ops.backends.native import wide_ops  # it registers torch operators

    return _linear if func is F.linear else wide_ops.matmul


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from tilewright.ops.backends.native import wide_ops  # it registers torch operators

    return wide_ops.linear(input, weight, bias)


@dataclass
class Region:
    """Formats inside one module's forward.

    Args:
        device_type: of the tensors inside.
        autocast: dtype that matmuls called as functions run in; None switches autocast off inside.
        functions: names in `FUNCTIONS` that run in FP32.
        widens: matmuls with 16-bit operands have these operands in FP32, for CPUs that multiply no others fast.
        attention: kernel in C++ that causal attention goes to, see `own_attention`; None: torch's.
        inputs: dtype that floating-point tensor arguments are cast to; None leaves them.
        outputs: dtype that floating-point results are cast to, also in tuples and dicts; None leaves them; "input" is
            that of the first floating-point argument.
    """

    device_type: str
    autocast: torch.dtype | None = None
    functions: frozenset[str] = frozenset()
    widens: bool = False
    attention: str | None = None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | str | None = None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run forward(*args, **kwargs) in the formats of an autocast region."""
        outputs = self.outputs
        if isinstance(outputs, str):  # "input"
            outputs = next((t.dtype for t in _tensors((args, kwargs)) if t.is_floating_point()), None)
        if self.inputs is not None:
            args = tuple(_cast(arg, self.inputs) if isinstance(arg, Tensor) else arg for arg in args)
            kwargs = {key: _cast(arg, self.inputs) if isinstance(arg, Tensor) else arg for key, arg in kwargs.items()}
        # Without its cache: that keeps 16-bit weights until the outermost region ends, after many steps maybe.
        on = self.autocast is not None
        with torch.autocast(self.device_type, dtype=self.autocast, enabled=on, cache_enabled=False):
            if self.functions or self.widens or self.attention is not None:
                with Fp32Functions(self.functions, widens=self.widens, attention=self.attention):
                    out = forward(*args, **kwargs)
            else:
                out = forward(*args, **kwargs)
        return out if outputs is None else _cast(out, outputs)


def region_of(module: nn.Module, device_type: str) -> Region:
    """The autocast region around a module, made at the first call. Its settings may be changed at any time.

    The module's class becomes a subclass whose forward runs inside the region. (Hooks that open a region and close it
    elsewhere would do as well, but torch.compile does not follow them.)

    Raises:
        ConfigError: the module's forward has been replaced on the object, so that its class has no say.
    """
    if "forward" in vars(module):
        raise ConfigError(
            "Module forward was replaced by another library",
            got=f"{type(module).__name__} with a forward of its own",
            need="the module as its class defines it",
            try_="convert the model before other tools wrap it (accelerator.prepare, dispatch hooks)",
        )
    if not isinstance(module, _Surrounded):
        derive(module, _surrounded)
    surrounded = cast(Any, module)
    if surrounded.precision_region is None:
        surrounded.precision_region = Region(device_type)
    return surrounded.precision_region


class _Surrounded(Derived):
    """Marks the classes made by `_surrounded`.

    Calling such a class, as transformers' `type(model).from_pretrained` does, makes a module that runs as one of the
    plain class: only `region_of` gives a module its region.
    """

    precision_region: Region | None = None


@functools.cache
def _surrounded(plain: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(plain.forward)
    def forward(self, *args, **kwargs):
        run = functools.partial(plain.forward, self)
        return (
            run(*args, **kwargs) if self.precision_region is None else self.precision_region.run(run, *args, **kwargs)
        )

    names = {"plain": plain, "made_by": _surrounded, "forward": forward}
    names |= {"__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Surrounded, plain), names)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors that autocast finds in nested tuples, lists and dicts, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)


def _low_dtype(tree: Any, *, autocast: bool) -> tuple[str, torch.dtype] | None:
    """The device and dtype of the first 16-bit tensor. With `autocast`, the 16-bit format that autocast would round to,
    if it is on. None if there is neither."""
    device = None
    for tensor in _tensors(tree):
        if tensor.dtype in LOW_DTYPES:
            return tensor.device.type, tensor.dtype
        device = device or tensor.device.type
    if not autocast or device is None or not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    return (device, dtype) if dtype in LOW_DTYPES else None


def _cast(tree: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """Cast for autocast: `tree` with its floating-point tensors (those of dtype `only`) in `dtype`.

    A dict keeps its class and identity, so that Hugging Face outputs stay what they are. FP64 is left alone.
    """
    if isinstance(tree, Tensor):
        wanted = tree.dtype == only if only else tree.dtype in (*LOW_DTYPES, torch.float32)
        return tree.to(dtype) if wanted else tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_cast(item, dtype, only) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_cast(item, dtype, only) for item in tree)
    if isinstance(tree, dict):
        for key, item in tree.items():
            tree[key] = _cast(item, dtype, only)
    return tree
