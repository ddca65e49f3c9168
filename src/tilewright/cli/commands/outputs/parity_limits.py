"""How far numbers of several ranks may be from those of one process in `tilewright doctor --parallel`.

Both sides compute the same function of the same weights, as each update is made of the same gradients (`parity_held`).
What differs is the order of sums, and what a last bit is rounded to. With u the rounding of a format, half its eps:

- FP32: of a sum of K products each partial sum is rounded by u of itself, this way or that: by u sqrt(K) in all.
- 16 bits: products are summed in FP32, and what comes out is rounded once, by u of the format.
- A gradient passes matmuls forward and backward. Their roundings add up as draws do: sqrt(how many).
- A loss is the mean over the tokens of a row, each with a rounding of its own: divided by sqrt(how many). One of a pair
  of answers is no mean.
- 8 bits: what differs by a last bit before is here and there another code, 2u of its value away. Gradients of many rows
  have 22 dB (28 were measured), which is asked of them. An expert may have seen one row: its gradient is one product,
  of which both factors may be codes apart in the values that count: 4u. So experts are held to this one by one, and to
  the 22 dB as the one tensor that they are for a layer.
- An update of equal gradients has the same bits however a tensor is cut, whatever the moments are stored in: two last
  bits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, get_args

from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.precision import ScaledFormat

if TYPE_CHECKING:
    from numpy import ndarray

    Arrays = Mapping[str, "ndarray[Any, Any]"]

UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "e4m3": 2.0**-4}
"""u by format."""
_NARROW = {"pure_fp16": "fp16", "tf32": "fp16"}
IN_8_BITS = 10 ** (-22 / 20)
"""Of a gradient: 22 dB."""
FP8_DISPATCH = 7e-2
"""Of a gradient: what the rounding of rows that travel to experts adds; E4M3 rounds by 2^-4 at the most."""
ROUTING = {"fp32": 5e-3, "16-bit": 5e-2, "8-bit": 1e-1}
"""By format: share of a router's choices that may be others. Of 8 experts, 2 per token, chance would give 0.75."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class ParityLimits:
    """Largest differences that a parity check accepts: of tensors relative to their norm on one process, of routers as
    a share of choices."""

    loss: float
    gradient: float
    expert: float
    """Of the gradient of one expert."""
    weight: float
    routing: float

    def of(self, kind: str, name: str) -> float | None:
        """The parity limit of a number or tensor; None of what is no result.

        Example:
            >>> limits = ParityLimits(1e-6, 1e-5, 0.25, 1e-7, 0.1)
            >>> limits.of("gradient", "experts.3.up.weight"), limits.of("gradient", "0.experts.3.up.weight")
            (1e-05, 0.25)
        """
        kind = "expert" if kind == "gradient" and _EXPERT.search(name) else kind
        return getattr(self, kind, None)


def limits_of(recipe: Recipe, one: "Arrays", ranks: int) -> ParityLimits:
    """The limits of a parity comparison of one process with several.

    Args:
        recipe: of both sides.
        one: what one process found, gradients under `gradient/...`: of which widths its sums are.
        ranks: whose gradients are added.
    """
    kind = format_of(recipe)
    gradient = IN_8_BITS if kind == "8-bit" else _rounded(recipe, one, kind)
    loss = gradient if recipe.data.format == "preferences" else gradient / sqrt(recipe.data.seq_len)
    expert = 4 * UNIT["e4m3"] if kind == "8-bit" else gradient
    if recipe.parallel.grad_sync != "fp32":  # ranks alone round what they send
        lost = sum_tolerance(UNIT["e4m3" if recipe.parallel.grad_sync == "fp8" else "bf16"], ranks)
        gradient, expert = gradient + lost, expert + lost
    if recipe.parallel.ep > 1 and recipe.parallel.dispatch == "fp8":  # and what travels to experts
        gradient, expert = gradient + FP8_DISPATCH, expert + FP8_DISPATCH
        loss = max(loss, IN_8_BITS / sqrt(recipe.data.seq_len))
    return ParityLimits(loss, gradient, expert, 4 * UNIT["fp32"], ROUTING[kind])


def _rounded(recipe: Recipe, one: "Arrays", kind: str) -> float:
    """Parity limit of a rounded gradient in 16 or 32 bits."""
    shapes = {
        in_stacks(name): value.shape
        for name, value in one.items()
        if name.startswith("gradient/") and value.ndim > 1 and ", step " not in name
    }
    tokens = recipe.data.seq_len * recipe.train.global_batch_size
    longest = max([tokens, *(size for shape in shapes.values() for size in shape)])
    unit = UNIT["fp32"] * sqrt(longest) if kind == "fp32" else UNIT[_NARROW.get(recipe.precision.mode, "bf16")]
    return unit * sqrt(2 * len(shapes))


def format_of(recipe: Recipe) -> str:
    """The format of matmuls that sets the parity limits: `fp32`, `16-bit` or `8-bit`. TF32 is `16-bit`: its matmuls
    have 11 bits."""
    mode = recipe.precision.mode if recipe.precision.enabled else "fp32"
    if mode in get_args(ScaledFormat):
        return "8-bit"
    return "fp32" if mode == "fp32" else "16-bit"


def in_stacks(name: str) -> str:
    """Replace the number of the expert in a parameter's name by `*`, so that parity limits hold for the stack.

    Example:
        >>> in_stacks("model.layers.1.mlp.experts.3.up_proj.weight")
        'model.layers.1.mlp.experts.*.up_proj.weight'
    """
    return _EXPERT.sub(".experts.*.", name)


def sum_tolerance(rounding: float, ranks: int) -> float:
    """The largest accepted difference of a sum relative to its norm, when each rank's summand is rounded and then the
    sum is.

    Summands of equal norm that have nothing to do with each other have a sum of sqrt(ranks) times their norm, and all
    errors add up to ranks times the rounding of one at the most.

    Args:
        rounding: of a value, relative to it.
        ranks: summands.

    Example:
        >>> sum_tolerance(2**-4, 1), sum_tolerance(2**-4, 4)
        (0.125, 0.1875)
    """
    return rounding * (ranks**0.5 + 1)
