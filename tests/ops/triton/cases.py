"""Matrices for tests of 8-bit kernels, the same in the interpreter and on a GPU: ragged, spread over all exponents,
with zero tiles, subnormals, infinities and NaN."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tilewright.formats.scaling import BLOCK_TILE, COLUMN_TILE, ROW_TILE, TENSORWISE, Tile
from tilewright.formats.spec import E4M3, E5M2, FloatSpec
from tilewright.formats.tiled import TiledTensor, fp8_format

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILES = (ROW_TILE, COLUMN_TILE, BLOCK_TILE, TENSORWISE, Tile(1, 0))
KINDS = ("normal", "outliers", "all exponents", "subnormal", "zeros", "not finite")


@dataclass(frozen=True)
class MatrixCase:
    """A matrix [rows, cols] of some kind."""

    rows: int
    cols: int
    kind: str
    dtype: torch.dtype
    seed: int = 0

    def matrix(self) -> Tensor:
        """The matrix, on CPU."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.rows, self.cols, generator=generator)
        if self.kind == "outliers":
            x = x * (1 + 1e4 * (torch.rand(x.shape, generator=generator) < 0.002))
        elif self.kind == "all exponents":
            x = torch.ldexp(x, torch.randint(-149, 128, x.shape, generator=generator))
        elif self.kind == "subnormal":
            # Of every input format: the smallest scales, and values around half of the smallest code.
            x = torch.ldexp(x, torch.randint(-135, -124, x.shape, generator=generator))
            if self.dtype == torch.float16:
                x = torch.ldexp(torch.randn(x.shape, generator=generator), torch.randint(-26, -13, x.shape))
        elif self.kind == "zeros":
            x = x * (torch.rand(x.shape, generator=generator) < 0.5)
            x[:, : self.cols // 2] = 0
            x[self.rows // 3 :, self.cols // 3 :] *= -0.0
        elif self.kind == "not finite":
            spoilt = torch.rand(x.shape, generator=generator)
            x[spoilt < 0.01], x[spoilt > 0.99] = torch.inf, -torch.inf
            x[(spoilt > 0.5) & (spoilt < 0.51)] = torch.nan
            x = torch.where((spoilt > 0.6) & (spoilt < 0.61), torch.nan * -torch.ones_like(x), x)
            x[: self.rows // 4] = x[: self.rows // 4].nan_to_num(0.0, 1.0, -1.0)  # and blocks without
        return x.to(self.dtype)


def matrix_cases(most: int = 300) -> st.SearchStrategy[MatrixCase]:
    """Matrices up to `most` x `most`."""
    edges = st.sampled_from([1, 2, 15, 16, 17, 127, 128, 129, 200, 256, 257, most])
    return st.builds(
        MatrixCase, edges, edges, st.sampled_from(KINDS), st.sampled_from(DTYPES), st.integers(0, 2**31 - 1)
    )


SPECS = (E4M3, E5M2)


@dataclass(frozen=True)
class GemmCase:
    """a [m, k] @ b [n, k].T in tiles of 1x128 and `b_tile`, or with one scale each."""

    m: int
    n: int
    k: int
    b_tile: Tile = BLOCK_TILE
    a_spec: FloatSpec = E4M3
    b_spec: FloatSpec = E4M3
    power_of_two: bool = True
    bias: bool = False

    def __str__(self) -> str:
        scales = "pow2" if self.power_of_two else "fp32"
        bias = " bias" if self.bias else ""
        return f"{self.m}x{self.n}x{self.k} {self.a_spec.name} {self.b_spec.name} {self.b_tile} {scales}{bias}"

    def operands(self, quantize, seed: int = 0) -> tuple[TiledTensor, TiledTensor, Tensor | None]:
        """(a, b, bias [n] FP32) with `quantize` of `formats` or an equal; magnitudes differ between tiles."""
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(self.m, self.k, generator=generator) * torch.exp2(
            4 * torch.randn(self.m, 1, generator=generator)
        )
        b = torch.randn(self.n, self.k, generator=generator) * torch.exp2(
            4 * torch.randn(1, self.k, generator=generator)
        )
        a_tile = TENSORWISE if self.b_tile == TENSORWISE else ROW_TILE
        return (
            quantize(a, fp8_format(self.a_spec, a_tile, power_of_two=self.power_of_two)),
            quantize(b, fp8_format(self.b_spec, self.b_tile, power_of_two=self.power_of_two)),
            torch.randn(self.n, generator=generator) if self.bias else None,
        )


def gemm_cases() -> Iterator[GemmCase]:
    """Aligned and ragged, all pairs of tiles, both formats, both kinds of scale, bias, nothing to multiply."""
    yield GemmCase(128, 128, 256)
    yield GemmCase(100, 72, 200, bias=True)
    yield GemmCase(5, 129, 17, power_of_two=False)
    yield GemmCase(65, 40, 300, ROW_TILE, E5M2, E4M3)
    yield GemmCase(130, 33, 256, ROW_TILE, power_of_two=False, bias=True)
    yield GemmCase(70, 130, 260, TENSORWISE)
    yield GemmCase(16, 16, 64, TENSORWISE, E5M2, E4M3, power_of_two=False)
    yield GemmCase(64, 96, 136, BLOCK_TILE, E5M2, E5M2)
    yield GemmCase(0, 64, 128)
    yield GemmCase(32, 16, 0, bias=True)


def assert_same_bits(got: TiledTensor, want: TiledTensor, name: str = "") -> None:
    """Equal codes and scales, or a failure that shows the first different element."""
    assert got.shape == want.shape, f"{name}: {got.shape}, want {want.shape}"
    for what, ours, theirs in (("scale", got.scale_inv, want.scale_inv), ("code", got.qdata, want.qdata)):
        ours, theirs = ours.cpu(), theirs.cpu()
        different = (ours != theirs).nonzero()
        if len(different):
            at = tuple(different[0].tolist())
            raise AssertionError(
                f"{name}: {len(different)} of {ours.numel()} {what}s differ; at {at}: {ours[at].item()}, "
                f"want {theirs[at].item()}"
            )
