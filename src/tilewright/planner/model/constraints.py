"""Choices that a planner may not make, because the recipe, the user or the run that is running has chosen it already.

`None` leaves a thing open. A run that continues fixes all that would change its numbers; what is left then (what layers
keep, and where bytes lie) changes no loss.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tilewright.core.config.recipe import Recipe, Tier
from tilewright.core.config.sections.precision import ScaledFormat
from tilewright.core.hardware import Machine
from tilewright.core.memory_plan import Activations
from tilewright.ops.base.compile import rounds_as_eager

BESIDE = ("checkpoint.async_save", "precision.eval_fp32")
"""Settings of what takes memory beside the steps, which a plan may switch off: they change nothing that is learned."""
SLICES = (4, 16)
"""Parts of an MLP that are tried."""
BLOCK_ROWS = 1024
"""Query rows at a time that are tried."""


@dataclass(frozen=True)
class Constraints:
    """Choices that are made already.

    Example:
        >>> there = [("keep", "device"), ("recompute", "device"), ("recompute", "host")]
        >>> Constraints(activations=frozenset(["recompute"]), inputs="host").kinds(there)
        [('recompute', 'host')]
    """

    executor: str | None = None
    micro_batch_size: int | None = None
    most_rows: int | None = None
    """No larger micro-batch than this."""
    loss_chunk_bytes: int | None = None
    activations: frozenset[Activations] | None = None
    """Only these."""
    parameters: Tier | None = None
    states: Tier | None = None
    inputs: Tier | None = None
    mlp_chunks: int | None = None
    attention_block: int | None = None
    layers: tuple["Constraints", ...] = ()
    """Of each layer by its number, where layers differ in it; then the rest of this is about embedding and head."""

    def of(self, indices: Sequence[int]) -> "Constraints":
        """The planner's constraints on the choices for these layers, which do not differ; (-1,) is embedding or
        head."""
        return self.layers[indices[0]] if self.layers and indices[0] >= 0 else self

    def tiers(self, which: Literal["parameters", "states"], there: Iterable[Tier]) -> list[Tier]:
        """The tiers that constraints allow among those that there are. One that is fixed is there."""
        fixed = self.parameters if which == "parameters" else self.states
        return list(there) if fixed is None else [fixed]

    def kinds(self, there: Iterable[tuple[Activations, Tier]]) -> list[tuple[Activations, Tier]]:
        """The ways to treat activations that constraints allow, each with the tier in which the layer's input waits."""
        return [
            (kind, tier)
            for kind, tier in there
            if self.inputs in (None, tier) and (self.activations is None or kind in self.activations)
        ]

    def chunkings(self, tiled: bool, blocked: bool) -> list[tuple[int, int]]:
        """The (MLP tiles, attention rows) that constraints allow to try; `tiled`, `blocked`: whether the layer can be
        cut so."""
        tiles = ((1, *SLICES) if tiled else (1,)) if self.mlp_chunks is None else (self.mlp_chunks,)
        blocks = ((0, BLOCK_ROWS) if blocked else (0,)) if self.attention_block is None else (self.attention_block,)
        return [(one, other) for one in tiles for other in blocks]


SELECTED: frozenset[Activations] = frozenset(("selective", "matmuls", "attention"))
"""They keep some results of a layer, which only the standard executor does."""
KEPT: frozenset[Activations] = frozenset(("keep", "recompute")) | SELECTED


def fuses(compiled: bool, machine: Machine) -> bool:
    """True if compiled layers may round in other places than eager ones. On a CPU they do not if torch can be told so
    (`ops.base.compile.rounds_as_eager`, held by a test); on a GPU it is not known yet."""
    return compiled and (machine.device != "cpu" or not rounds_as_eager())


def same_bits(recipe: Recipe, fused: bool, kind: Activations) -> frozenset[Activations]:
    """Other activations that a layer may keep without a change of a bit. There are none if it is recomputed from
    rounded inputs. If the compiler fuses operations into other roundings (`fuses`), no other kind with 8-bit matmuls is
    one, and none of `SELECTED`.

    Example:
        >>> sorted(same_bits(Recipe(), True, "keep"))
        ['keep', 'recompute']
    """
    precision = recipe.precision
    formats = {precision.mode, precision.start_mode or precision.mode}
    formats |= {fmt for rule in precision.rules for fmt in (rule.compute, rule.fprop, rule.dgrad, rule.wgrad)}
    scaled = precision.enabled and not formats.isdisjoint(get_args(ScaledFormat))
    if recipe.train.checkpoint_inputs != "exact" or (fused and scaled):
        return frozenset([kind])
    if not fused:
        return KEPT
    return frozenset([kind]) if kind in SELECTED else KEPT - SELECTED
