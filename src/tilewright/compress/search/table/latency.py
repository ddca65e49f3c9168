"""The latency of parts and of whole decoders here: a prefill, and a token behind it with everything before it cached.

It is measured in tilewright's own runtime, as `generate` and `serve` run it, in FP32, one row. A part is timed in a
stack of copies with weights of their own, as many bytes as the run has: a cached token reads each weight once, and in a
stack of one it would find all in the processor's caches, which a whole model does not.

Legend: B rows  S positions  D model width.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.compress.budget.call_seconds import Clock, Seconds, measure
from tilewright.compress.search.library.layer_parts import new_part
from tilewright.core.hardware import detect_machine
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.cache import DecoderCache
from tilewright.models.decoder.config import DecoderConfig, LayerShape
from tilewright.models.decoder.layers import rope_angles
from tilewright.ops.kernels import Kernels
from tilewright.precision.mixed import few_row_layers

_MOST_COPIES = 512


@dataclass(frozen=True)
class Latency:
    """Latency of one part, or of a decoder.

    Args:
        prefill: of the context.
        token: behind it, with a cache for as many positions and one more.
    """

    prefill: Seconds
    token: Seconds

    def to_json(self) -> dict[str, Any]:
        """The latency as plain types for JSON."""
        return {"prefill": self.prefill.to_json(), "token": self.token.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Latency":
        """A latency from the JSON of `to_json`."""
        return cls(Seconds(**row["prefill"]), Seconds(**row["token"]))

    def beside(self, later: "Latency") -> "Latency":
        """Combine two latency measurements of one thing: see `Seconds.beside`."""
        return Latency(self.prefill.beside(later.prefill), self.token.beside(later.token))

    def less(self, other: "Latency") -> "Latency":
        """The latency that one thing has more than another, at least none; as steady as both."""
        pairs = (self.prefill, other.prefill), (self.token, other.token)
        return Latency(
            *(
                Seconds(max(0.0, mine.least - its.least), max(mine.spread, its.spread), mine.steady and its.steady)
                for mine, its in pairs
            )
        )

    @property
    def steady(self) -> bool:
        """True if both seconds of a latency are steady."""
        return self.prefill.steady and self.token.steady


def as_served(model: Any) -> Any:
    """A decoder whose latency is that of serving, with layers for a few rows (`precision.mixed.few_row_layers`): a copy
    that shares all tensors with the one given, which stays as it is."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, tensors)
    few_row_layers.attach(copied, detect_machine("cpu"))
    return copied


@torch.no_grad()
def model_latency(model: Any, context: int, clock: Clock) -> tuple[Latency, int]:
    """Latency of a decoder that answers one row, and the bytes of its cache.

    Args:
        model: in memory.
        context: tokens before the cached one, at least 1.
        clock: seconds.
    """
    model = as_served(model)
    ids_BS = torch.zeros(1, context, dtype=torch.int64)
    cache = model.new_cache(1, context + 1)

    def call(length: int) -> Callable[[], None]:
        def run() -> None:
            model.next_token_logits(ids_BS[:, :length], cache)
            cache.advance(-length)

        return run

    with evaluation(model):
        prefill = measure(call(context), clock)
        cache.advance(context)
        return Latency(prefill, measure(call(1), clock)), cache.num_bytes


@torch.no_grad()
def part_latency(
    config: DecoderConfig,
    layer: int,
    shape: LayerShape,
    kernels: Kernels,
    *,
    stack_bytes: int,
    context: int,
    clock: Clock,
) -> tuple[Latency, int]:
    """Latency of a part, and the bytes of its cache.

    Args:
        config: of the decoder.
        layer: that the part is of.
        shape: of the part alone.
        kernels: that it runs with.
        stack_bytes: of weights in the stack, about.
        context: tokens before the cached one.
        clock: seconds.
    """
    one = _copy(config, layer, shape, kernels)
    size = sum(param.numel() * param.element_size() for param in one.parameters())
    copies = min(_MOST_COPIES, max(2, round(stack_bytes / size)))
    machine = detect_machine("cpu")
    stack = [one, *(_copy(config, layer, shape, kernels) for _ in range(copies - 1))]
    for copied in stack:
        few_row_layers.attach(copied, machine)
    cache = DecoderCache(copies, 1, context + 1)
    x_BSD = torch.randn(1, context, config.dim, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_angles(torch.arange(context + 1)[None], config.rope_dim, config.rope_theta)

    def call(first: int, length: int) -> Callable[[], None]:
        angles = cos[:, first : first + length], sin[:, first : first + length]

        def run() -> None:
            x = x_BSD[:, :length]
            for block, kept in zip(stack, cache.layers, strict=True):
                block(x, *angles, None, kept)

        return run

    prefill = measure(call(0, context), clock)
    cache.advance(context)
    token = measure(call(context, 1), clock)
    return Latency(_shared(prefill, copies), _shared(token, copies)), cache.num_bytes // copies


def _copy(config: DecoderConfig, layer: int, shape: LayerShape, kernels: Kernels) -> Block:
    """A part with small random weights, to measure its latency."""
    made = new_part(config, layer, shape, kernels)
    for param in made.parameters():
        param.normal_(0, 0.02)
    for buffer in made.buffers():
        buffer.zero_()
    return made


def _shared(seconds: Seconds, copies: int) -> Seconds:
    return Seconds(seconds.least / copies, seconds.spread, seconds.steady)
