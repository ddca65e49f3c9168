"""Who owns the seconds of a step on a CPU: torch's profiler watches one, and each operation's own time has an owner.

    with watched() as profile:
        executor.step(microbatches, lr)
    found = owners(profile.function_events)

An operation inside another one counts for itself: its time is not in that of the outer one. Of compiled layers all
loops together have one owner; each matmul and attention that they call is known by itself.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch.autograd.profiler import profile, record_function

STEP = "tilewright step"
"""Name of what is watched, in the profile."""
FORWARD, BACKWARD = "matmuls forward", "matmuls backward"
CLIP, REST = "clipping and checks", "rest (Python, waiting)"
_MATMUL, _FORMATS = "matmul", "formats (casts, codes, copies)"
_ELEMENTWISE, OTHER = "element-wise (norm, activation, residual)", "other calls"

_INSIDE: Mapping[str, re.Pattern[str]] = {
    "optimizer": re.compile(r"^Optimizer\.step#"),
    "head and loss": re.compile(r"_ChunkedLoss|_TopKLoss|cross_entropy|nll_loss"),
    "attention": re.compile(r"attention|^_Blocked", re.I),
    "exchanges between ranks": re.compile(r"^c10d::|^gloo:|^nccl:|^_AllToAll|^_Moved|^FSDP::"),
    "gradient sums": re.compile(r"AccumulateGrad"),
}
"""Owners of all that runs inside of such an operation, by its name; the first that is found, from the outside in."""
_ITSELF: Mapping[str, re.Pattern[str]] = {
    _MATMUL: re.compile(
        r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul|mkldnn_linear|_int_mm|_scaled_mm|_grouped_mm|\w*convolution\w*)$"
        r"|^mkldnn|^tilewright::(\w*gemm|\w*matmul|scaled_mm|weight_gradient|int8_\w+|tile_fprop|tile_bprop)$"
    ),
    _FORMATS: re.compile(r"^aten::(copy_|_to_copy|to|contiguous|clone)$|quantize|encode|Round"),
    _ELEMENTWISE: re.compile(
        r"^aten::_?(add\w*|sub|mul|div|neg|pow|square|sqrt|rsqrt|exp|silu|gelu|relu|sigmoid|tanh|softmax|sum|mean|cos|sin"
        r"|lerp|where|cat|stack|\w*norm\w*|clamp\w*|index\w*|gather|scatter\w*|embedding\w*|dropout|fill|zero)"
        r"(_backward\w*)?_?$"
    ),
    "compiled loops (norm, SwiGLU, residual)": re.compile(r"^## Call CompiledFxGraph"),
}
"""Owners of an operation's own time, by its name or that of the nearest one around it."""


class ProfiledEvent(Protocol):
    """The fields read of `torch.autograd.profiler_util.FunctionEvent`. Times in microseconds."""

    name: str
    cpu_children: Sequence[Any]
    time_range: Any
    self_cpu_time_total: float
    cpu_time_total: float


@dataclass(frozen=True)
class Owner:
    """The share of one owner in a step."""

    name: str
    seconds: float
    calls: int


@contextmanager
def watched() -> Iterator[profile]:
    """A profile of the step that runs inside, in this thread. Its `function_events` are for `owners`."""
    watching = profile(use_kineto=False)
    with watching, record_function(STEP):
        yield watching


def owners(events: Iterable[ProfiledEvent]) -> list[Owner]:
    """Owners of a step's seconds, the largest first; `REST` is what no operation took.

    Args:
        events: of a profile made by `watched`.

    Raises:
        ValueError: there is no step among them.
    """
    step = next((event for event in events if event.name == STEP), None)
    if step is None:
        raise ValueError(f"no event {STEP!r} in the profile")
    passed = [event.time_range.end for event in step.cpu_children if _is_backward(event)]
    sums: dict[str, list[float]] = {REST: [step.self_cpu_time_total, 1]}
    for event in step.cpu_children:
        after = bool(passed) and event.time_range.start >= max(passed)
        for owner, seconds in _walk(event, None, OTHER, _is_backward(event)):
            one = sums.setdefault(CLIP if after and owner in _IN_UPDATE else owner, [0.0, 0])
            one[0], one[1] = one[0] + seconds, one[1] + 1
    found = [Owner(name, us / 1e6, int(calls)) for name, (us, calls) in sums.items()]
    return sorted(found, key=lambda one: -one.seconds)


def explained(found: Sequence[Owner]) -> float:
    """The share of a step whose owner is known: all but `OTHER` and `REST`.

    Example:
        >>> explained([Owner("optimizer", 3.0, 1), Owner(REST, 1.0, 1)])
        0.75
    """
    whole = sum(one.seconds for one in found)
    return sum(one.seconds for one in found if one.name not in (OTHER, REST)) / whole


_IN_UPDATE = (OTHER, _ELEMENTWISE, _FORMATS)
"""Owners whose operations, behind the last backward pass and outside of the optimizer, are of norms, clipping and
checks."""


def _walk(event: ProfiledEvent, inside: str | None, around: str, backward: bool) -> Iterator[tuple[str, float]]:
    """Owner of the step's seconds and own microseconds of an operation and of all in it.

    Args:
        event: the operation.
        inside: the owner of all that it is in, if one has been found.
        around: whose an operation without an owner of its own is.
        backward: whether a backward pass runs it.
    """
    inside = inside or next((owner for owner, name in _INSIDE.items() if name.search(event.name)), None)
    around = next((owner for owner, name in _ITSELF.items() if name.search(event.name)), around)
    kind = (BACKWARD if backward else FORWARD) if around == _MATMUL else around
    yield inside or kind, event.self_cpu_time_total
    for child in event.cpu_children:
        yield from _walk(child, inside, around, backward or _is_backward(child))


def _is_backward(event: ProfiledEvent) -> bool:
    return event.name.startswith("autograd::engine::evaluate_function")
