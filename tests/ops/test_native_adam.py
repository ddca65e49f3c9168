"""AdamW of wide and of rounded tensors: any memory layout, and any part of a tensor."""

from itertools import pairwise

import pytest
import torch

from tilewright.ops.backends.native import adam as native_adam
from tilewright.ops.backends.ref import adam as ref
from tilewright.ops.backends.ref.adam import AdamHyper


@pytest.mark.parametrize("layout", ["plain", "turned", "cut", "overlapping", "in two orders"])
def test_the_fused_update_copies_only_what_it_must(layout):
    """Its kernel goes through memory: four tensors without gaps and in one order need no copy."""
    stored = [torch.arange(24.0).reshape(4, 6) + number for number in range(4)]
    if layout == "turned":
        row = tuple(tensor.T for tensor in stored)
    elif layout == "cut":
        row = tuple(tensor[:, :5] for tensor in stored)
    elif layout == "overlapping":
        row = tuple(tensor.as_strided((3, 3), (1, 1)) for tensor in stored)
    elif layout == "in two orders":
        row = (stored[0].reshape(6, 4), *(tensor.T for tensor in stored[1:]))
    else:
        row = tuple(stored)
    alike = native_adam._alike(row)
    assert (alike is row) == (layout in ("plain", "turned"))
    assert all(torch.equal(tensor, given) for tensor, given in zip(alike, row, strict=True))
    assert len({tensor.stride() for tensor in alike}) == 1


CASES = {
    "fused fp32": (native_adam.fused, torch.float32, torch.float32),
    "fused fp64": (native_adam.fused, torch.float64, torch.float64),
    "compiled bf16 moments": (native_adam.compiled, torch.float32, torch.bfloat16),
    "compiled bf16 weights": (native_adam.compiled, torch.bfloat16, torch.float32),
    "ref bf16 moments": (ref.adam, torch.float32, torch.bfloat16),
    "ref bf16 weights": (ref.adam, torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize(("update", "dtype", "moments"), CASES.values(), ids=CASES)
def test_an_element_has_the_bits_of_the_whole_tensor_in_any_part_of_it(update, dtype, moments):
    """As on a rank that holds rows of it: neither vectors nor random numbers begin where the part does."""
    size, cuts = 1003, (0, 1, 18, 37, 300, 301, 334, 1003)
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(size, generator=generator).to(dtype)
    whole = [param, torch.zeros(size, dtype=moments), torch.zeros(size, dtype=moments)]
    parts = [[tensor[a:b].clone() for tensor in whole] for a, b in pairwise(cuts)]
    for step in range(1, 9):
        grad = torch.randn(size, generator=generator)
        grad = grad if dtype == torch.bfloat16 else grad.to(dtype)
        hyper = AdamHyper(step, 3e-3, 0.9, 0.95, 1e-8, 0.1, 0)
        update([whole[0]], [grad], [whole[1]], [whole[2]], [3], hyper)
        grads = [grad[a:b].clone() for a, b in pairwise(cuts)]
        columns = [list(column) for column in zip(*parts, strict=True)]
        update(columns[0], grads, *columns[1:], [3] * len(parts), hyper, cuts[:-1])
    for name, want, got in zip(
        ("param", "exp_avg", "exp_avg_sq"), whole, map(torch.cat, zip(*parts, strict=True)), strict=True
    ):
        assert not (different := (got != want).nonzero().flatten().tolist()), f"{name} differs at {different[:9]}"
