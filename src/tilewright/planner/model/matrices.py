"""Matrices of hidden layers, which Muon updates: their states, and what Newton-Schulz takes of them.

Legend: E matrices of a stack  R rows  C columns  S the smaller of R and C, L the larger.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from torch import Tensor

from tilewright.formats.quadratic_map import scale_shape

ITERATIONS = 5
_WIDE = 4
"""Bytes of FP32."""
_NARROW = 2


@dataclass(frozen=True)
class Matrices:
    """Trained matrices of a part of a model: how many there are of each shape, [R, C] or [E, R, C]."""

    shapes: Mapping[tuple[int, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, tensor: Tensor) -> "Matrices":
        """One of them."""
        return cls({tuple(tensor.shape): 1})

    def __add__(self, other: "Matrices") -> "Matrices":
        keys = {**self.shapes, **other.shapes}
        return Matrices({shape: self.shapes.get(shape, 0) + other.shapes.get(shape, 0) for shape in keys})

    def __rmul__(self, number: int) -> "Matrices":
        return Matrices({shape: number * count for shape, count in self.shapes.items()})

    @cached_property
    def elements(self) -> int:
        """Of all of them."""
        return sum(count * prod(shape) for shape, count in self.shapes.items())

    @cached_property
    def blocks(self) -> int:
        """Scales of a momentum in 8 bits."""
        return sum(count * prod(scale_shape(shape)) for shape, count in self.shapes.items())

    def newton_schulz_s(self, matmul_s: Callable[[float, float], float]) -> float:
        """Seconds of one update's iterations, of `matmul_s(width, FLOPs)` for one GEMM in BF16.

        Each iteration multiplies [S, L] by its transpose, [S, S] by itself, and [S, S] by [S, L].
        """
        total = 0.0
        for shape, count in self.shapes.items():
            (short, long), stacked = sorted(shape[-2:]), prod(shape[:-2])
            wide = matmul_s((short * long) ** 0.5, 2.0 * stacked * short**2 * long)
            total += count * ITERATIONS * (2 * wide + matmul_s(short, 2.0 * stacked * short**3))
        return total

    def update_bytes(self, moments: str, master: str) -> float:
        """Most bytes that an update of one of them takes beyond weights, gradient and states (`optim.muon_update`).

        In turn: the next momentum in FP32 and in BF16; two matrices and two products [S, S] in BF16; the direction in
        BF16 and FP32. With all of it, what is to be stored where that is rounded.
        """
        most = 0.0
        for shape in self.shapes:
            number, grams = prod(shape), prod(shape[:-2]) * min(shape[-2:]) ** 2
            iteration = 2 * _NARROW * (number + grams)
            stored = {"fp32": 0, "bf16": 2, "8bit": 1}[moments] * number
            after = {"fp32": 0, "split24": 3, "stochastic": 2}[master] * number
            most = max(most, stored + max((_WIDE + _NARROW) * number, iteration, _WIDE * number + after))
        return most
