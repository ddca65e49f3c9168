"""Rows of tokens that go through experts: what ranks exchange where experts are spread over them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tilewright.parallel.inside.experts.stacked import TAKES, stacked_experts


@dataclass(frozen=True)
class RoutedRows:
    """Rows that a layer's experts read and give back, of the tokens of one row of the batch: each token's as often as
    it goes through an expert.

    `values`: elements. `read_bytes`, `made_bytes`: of a value that they read, and of one of their results.
    """

    values: float = 0.0
    read_bytes: int = 0
    made_bytes: int = 0


class ExpertCalls:
    """Sees what a layer's stacked experts are called with.

    Attributes:
        rows: of all calls.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._experts = [module for _, module in stacked_experts(layer)]
        self.rows = RoutedRows()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a layer runs, and the rows that are routed to its experts are counted."""
        handles = [module.register_forward_hook(self._see, with_kwargs=True) for module in self._experts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        x_ND, experts_NK = (*args, *(kwargs[name] for name in TAKES[len(args) :]))[:2]
        values = self.rows.values + experts_NK.numel() * x_ND.shape[-1]
        self.rows = RoutedRows(values, x_ND.dtype.itemsize, out.dtype.itemsize)
