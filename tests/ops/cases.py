"""Case generators shared by the tests and the benchmarks of the operations."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCase:
    """Shapes of one attention call. `docs`: documents in a row, 0 for no segments."""

    batch: int
    heads: int
    kv_heads: int
    positions: int
    key_dim: int
    value_dim: int
    docs: int = 0

    def tensors(self, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        q = normal(self.batch, self.heads, self.positions, self.key_dim)
        k = normal(self.batch, self.kv_heads, self.positions, self.key_dim)
        v = normal(self.batch, self.kv_heads, self.positions, self.value_dim)
        if not self.docs:
            return q, k, v, None
        cuts = torch.rand(self.batch, self.positions, generator=generator) < self.docs / self.positions
        segments = cuts.cumsum(-1).to(torch.int32)
        segments[:, -3:] = -1  # padding at the end of a row
        return q, k, v, segments


def attention_cases() -> Iterator[AttentionCase]:
    """Plain, grouped, ragged, multi-block, documents, narrow values."""
    yield AttentionCase(2, 4, 4, 64, 16, 16)
    yield AttentionCase(2, 4, 2, 48, 16, 16, docs=4)
    yield AttentionCase(1, 2, 1, 301, 32, 32, docs=3)
    yield AttentionCase(1, 2, 2, 65, 24, 16, docs=2)
    yield AttentionCase(1, 2, 2, 520, 16, 16)


def awkward_matrix(rows: int, cols: int, dtype: torch.dtype, seed: int, layout: str = "plain") -> Tensor:
    """A matrix [rows, cols] that is hard to quantise: wide range, zeros and zero tiles, subnormals, infinities, NaN.

    Args:
        rows: rows.
        cols: columns.
        dtype: any float dtype.
        seed: of the values.
        layout: plain, turned (columns contiguous), cut (rows further apart), strided (nothing contiguous), or repeated
            (stride 0 down).
    """
    generator = torch.Generator().manual_seed(seed)
    stored = {"turned": (cols, rows), "cut": (rows, cols + 3), "strided": (rows, 2 * cols), "repeated": (1, cols)}
    shape = stored.get(layout, (rows, cols))
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 5)
    kind = torch.rand(shape, generator=generator)
    values[kind < 0.02] = 0.0
    values[(kind > 0.02) & (kind < 0.03)] *= 1e-39
    values[(kind > 0.03) & (kind < 0.04)] *= 1e36
    values[(kind > 0.04) & (kind < 0.042)] = torch.nan
    values[(kind > 0.042) & (kind < 0.044)] = -torch.inf
    values[:, 128:256] *= float(torch.rand((), generator=generator) < 0.7)
    x = values.to(dtype)
    views = {
        "turned": lambda: x.T,
        "cut": lambda: x[:, 3:],
        "strided": lambda: x[:, ::2],
        "repeated": lambda: x.expand(rows, cols),
    }
    return views.get(layout, lambda: x)()
