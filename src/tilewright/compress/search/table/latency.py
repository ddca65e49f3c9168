"""The latency of parts and of whole decoders here: a prefill, and a token behind it with everything before it cached.

It is measured in tilewright's own runtime, as `generate` and `serve` run it, in FP32, one row. A part is timed in a
stack of copies with weights of their own, as many bytes as the run has: a cached token reads each weight once, and in a
stack of one it would find all in the processor's caches, which a whole model does not. All but the run itself is timed
in turns with the run.

Legend: B rows  S positions  D model width.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tilewright.compress.budget.call_seconds import Clock, Seconds, measure, measure_beside
from tilewright.compress.search.library.layer_parts import new_part
from tilewright.core.hardware import detect_machine
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


@dataclass(frozen=True)
class TimedCalls:
    """The calls of one part, or of a decoder, whose latency is measured.

    Args:
        prefill: of the context.
        token: behind it.
        cache: bytes of keys and values.
        copies: of the part in each call; of a decoder one.
    """

    prefill: Callable[[], object]
    token: Callable[[], object]
    cache: int
    copies: int = 1

    @torch.no_grad()
    def latency(self, clock: Clock) -> Latency:
        """Latency of these calls, timed alone."""
        return self._of_one(Latency(measure(self.prefill, clock), measure(self.token, clock)))

    @torch.no_grad()
    def latency_beside(self, run: "TimedCalls", known: Latency, clock: Clock) -> Latency:
        """Latency of these calls in turns with the run's, which is known."""
        prefill = measure_beside(self.prefill, run.prefill, known.prefill, clock)
        return self._of_one(Latency(prefill, measure_beside(self.token, run.token, known.token, clock)))

    def _of_one(self, all_of_them: Latency) -> Latency:
        return Latency(*(replace(of, least=of.least / self.copies) for of in (all_of_them.prefill, all_of_them.token)))


Timed = Callable[[TimedCalls], Latency]


@torch.no_grad()
def model_calls(model: Any, context: int) -> TimedCalls:
    """The calls of a decoder that answers one row.

    Args:
        model: in memory; it stays as it is.
        context: tokens before the cached one, at least 1.
    """
    model = as_served(model).eval()
    ids_BS = torch.zeros(1, context, dtype=torch.int64)
    empty, full = (model.new_cache(1, context + 1) for _ in range(2))
    model.next_token_logits(ids_BS, full)

    def run(cache: DecoderCache, length: int) -> None:
        model.next_token_logits(ids_BS[:, :length], cache)
        cache.advance(-length)

    return TimedCalls(partial(run, empty, context), partial(run, full, 1), full.num_bytes)


@torch.no_grad()
def part_calls(
    config: DecoderConfig, layer: int, shape: LayerShape, kernels: Kernels, *, stack_bytes: int, context: int
) -> TimedCalls:
    """The calls of a part.

    Args:
        config: of the decoder.
        layer: that the part is of.
        shape: of the part alone.
        kernels: that it runs with.
        stack_bytes: of weights in the stack, about.
        context: tokens before the cached one.
    """
    one = _copy(config, layer, shape, kernels)
    size = sum(param.numel() * param.element_size() for param in one.parameters())
    copies = min(_MOST_COPIES, max(2, round(stack_bytes / size)))
    machine = detect_machine("cpu")
    stack = [one, *(_copy(config, layer, shape, kernels) for _ in range(copies - 1))]
    for copied in stack:
        few_row_layers.attach(copied, machine)
    empty, full = (DecoderCache(copies, 1, context + 1) for _ in range(2))
    x_BSD = torch.randn(1, context, config.dim, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_angles(torch.arange(context + 1)[None], config.rope_dim, config.rope_theta)

    def run(cache: DecoderCache, first: int, length: int) -> None:
        x, angles = x_BSD[:, :length], (cos[:, first : first + length], sin[:, first : first + length])
        for block, kept in zip(stack, cache.layers, strict=True):
            block(x, *angles, None, kept)

    run(full, 0, context)
    full.advance(context)
    return TimedCalls(partial(run, empty, 0, context), partial(run, full, context, 1), full.num_bytes // copies, copies)


def _copy(config: DecoderConfig, layer: int, shape: LayerShape, kernels: Kernels) -> Block:
    """A part with small random weights, to measure its latency."""
    made = new_part(config, layer, shape, kernels)
    for param in made.parameters():
        param.normal_(0, 0.02)
    for buffer in made.buffers():
        buffer.zero_()
    return made
