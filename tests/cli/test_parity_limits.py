"""Limits of `doctor --parallel`: what sums in another order, rounded summands and other codes make of numbers is within
them, and a fault is not."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.shapes import KERNELS
from tests.parallel.communicate.exchanges import reduced_together
from tilewright.cli.commands.outputs.parity import gaps
from tilewright.cli.commands.outputs.parity_limits import IN_8_BITS, UNIT, limits_of, sum_tolerance
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import load_recipe
from tilewright.formats.tiled import FP8_ROW


def recipe_of(**more):
    return changed(load_recipe("default", {}, environ={}).recipe, {"data.seq_len": 128} | more)


def error(got, want):
    return float((got - want).norm() / want.norm())


@given(
    widths=st.lists(st.sampled_from([48, 64, 300, 1024]), min_size=2, max_size=12),
    parts=st.sampled_from([2, 4]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=20, deadline=None)
def test_sums_in_parts_are_within_the_limit_of_as_many_matmuls(widths, parts, seed):
    """A chain of matmuls, each sum in one piece or in parts that are added: as `tp` has them, forward and backward."""
    generator = torch.Generator().manual_seed(seed)
    whole = cut = torch.randn(16, widths[0], generator=generator)
    one = {}
    for number, (inner, outer) in enumerate(pairwise(widths)):
        weight = torch.randn(inner, outer, generator=generator) * inner**-0.5
        whole = whole @ weight
        cut = sum(a @ b for a, b in zip(cut.chunk(parts, 1), weight.chunk(parts), strict=True))
        one[f"gradient/{number}"] = weight.numpy()
    limits = limits_of(recipe_of(**{"precision.mode": "fp32"}), one, 1)
    assert error(cut, whole) <= limits.gradient
    assert limits.loss < limits.gradient < 1e-4, "and it is tight"


@given(rows=st.integers(1, 3), spread=st.integers(0, 6), seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_an_expert_of_few_rows_is_within_its_limit_whatever_codes_its_last_bits_make(rows, spread, seed):
    """Values of many sizes, which differ by a rounding to BF16, and are coded."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(width):
        x = torch.randn(rows, width, generator=generator)
        x = x * 2.0 ** torch.randint(-spread, 1, (rows, width), generator=generator)
        near = x * (1 + UNIT["bf16"] * (2 * torch.rand(x.shape, generator=generator) - 1))
        return [KERNELS.quantize(each, FP8_ROW).dequantize() for each in (x, near)]

    (dy, other_dy), (x, other_x) = drawn(32), drawn(64)
    limits = limits_of(recipe_of(**{"precision.mode": "fp8_tile"}), {}, 1)
    assert error(other_dy.T @ other_x, dy.T @ x) <= limits.expert


def test_experts_are_compared_one_by_one_and_as_one_tensor():
    limits = limits_of(recipe_of(**{"precision.mode": "fp8_tile"}), {}, 1)
    one = {f"gradient/a.experts.{number}.up.weight": np.full(100, 10.0 ** -(number == 1)) for number in range(3)}
    noisy = one | {"gradient/a.experts.1.up.weight": np.full(100, 0.1 * (1 + 2 * IN_8_BITS))}
    found = {gap.name: gap for gap in gaps(one, noisy, limits)}
    assert all(gap.ok for gap in found.values()), "a small one of few rows is less exact"
    assert found["a.experts.*.up.weight"].tolerance == IN_8_BITS
    wrong = one | {"gradient/a.experts.1.up.weight": np.zeros(100)}
    assert not {gap.name: gap for gap in gaps(one, wrong, limits)}["a.experts.1.up.weight"].ok
    off = one | {"gradient/a.experts.0.up.weight": np.full(100, 1.2)}
    assert not {gap.name: gap for gap in gaps(one, off, limits)}["a.experts.*.up.weight"].ok


@pytest.mark.parametrize(("wire", "rounding"), [("bf16", 2.0**-8), ("fp8", 2.0**-4)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_of_rounded_gradients_are_within_the_limit(wire, rounding, ranks):
    """Gradients that share a part, and have a part of their own; sizes from tile to tile over many powers of two."""
    limits = limits_of(recipe_of(**{"parallel.grad_sync": wire, "precision.mode": "fp32"}), {}, ranks)
    assert limits.gradient == pytest.approx(sum_tolerance(rounding, ranks))
    generator = torch.Generator().manual_seed(ranks)
    sizes = 2.0 ** torch.randint(-30, 10, (64, 1), generator=generator).expand(64, 128).reshape(-1)
    draws = torch.randn(ranks + 1, 8192, generator=generator) * sizes
    flats = [draws[rank] + draws[ranks] for rank in range(ranks)]
    exact, sent = torch.stack(flats).sum(0), reduced_together(flats, wire, KERNELS)
    for tile in range(64):  # each, so that the largest does not hide the others
        part = slice(128 * tile, 128 * tile + 128)
        assert error(sent[part], exact[part]) <= limits.gradient, f"tile {tile}"
