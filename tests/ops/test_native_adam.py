"""AdamW of wide and of rounded tensors: any memory layout, and any part of a tensor."""

import contextlib
from itertools import pairwise

import pytest
import torch

from tests.ops import follow
from tests.training.out_of_memory import Allocator
from tilewright.ops.backends.cpu import low_bit_adam as cpu_adam
from tilewright.ops.backends.native import adam as native_adam
from tilewright.ops.backends.ref import adam as ref
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.ref.follow_writes import follow_writes


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
    "fused master": (native_adam.fused, torch.float32, torch.float32, torch.bfloat16),
    "compiled master": (native_adam.compiled, torch.float32, torch.bfloat16, torch.float16),
    "fused fp64": (native_adam.fused, torch.float64, torch.float64),
    "cpu fp32": (cpu_adam.adam, torch.float32, torch.float32),
    "cpu bf16": (cpu_adam.adam, torch.bfloat16, torch.bfloat16),
    "cpu master": (cpu_adam.adam, torch.float32, torch.bfloat16, torch.float16),
    "compiled bf16 moments": (native_adam.compiled, torch.float32, torch.bfloat16),
    "compiled bf16 weights": (native_adam.compiled, torch.bfloat16, torch.float32),
    "ref bf16 moments": (ref.adam, torch.float32, torch.bfloat16),
    "ref bf16 weights": (ref.adam, torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_element_has_the_bits_of_the_whole_tensor_in_any_part_of_it(case):
    """As on a rank that holds rows of it: neither vectors nor random numbers begin where the part does."""
    update, dtype, moments, *weight = case
    size, cuts = 1003, (0, 1, 18, 37, 300, 301, 334, 1003)
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(size, generator=generator).to(dtype)
    whole = [param, torch.zeros(size, dtype=moments), torch.zeros(size, dtype=moments), *(param.to(d) for d in weight)]
    parts = [[tensor[a:b].clone() for tensor in whole] for a, b in pairwise(cuts)]
    for step in range(1, 9):
        grad = torch.randn(size, generator=generator)
        grad = grad if dtype == torch.bfloat16 else grad.to(dtype)
        hyper = AdamHyper(step, 3e-3, 0.9, 0.95, 1e-8, 0.1, 0)
        update([whole[0]], [grad], [whole[1]], [whole[2]], [3], hyper, [0], *([x] for x in whole[3:]))
        grads = [grad[a:b].clone() for a, b in pairwise(cuts)]
        columns = [list(column) for column in zip(*parts, strict=True)]
        update(columns[0], grads, *columns[1:3], [3] * len(parts), hyper, cuts[:-1], *columns[3:])
    for name, want, got in zip(
        ("param", "exp_avg", "exp_avg_sq", "weight")[: len(whole)],
        whole,
        map(torch.cat, zip(*parts, strict=True)),
        strict=True,
    ):
        assert not (different := (got != want).nonzero().flatten().tolist()), f"{name} differs at {different[:9]}"


# ---- masters and their weights ----

MASTERS = {
    "cpu": (cpu_adam.adam, torch.float32),
    "cpu bf16 moments": (cpu_adam.adam, torch.bfloat16),
    "fused": (native_adam.fused, torch.float32),
    "compiled": (native_adam.compiled, torch.bfloat16),
    "ref": (ref.adam, torch.float32),
    "ref bf16 moments": (ref.adam, torch.bfloat16),
}
LAYOUTS = {
    "plain": lambda x: x,
    "turned": lambda x: x.T,
    "cut": lambda x: x[:, :-3],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


def master_row(dtype, moments, shape):
    """A master, its gradient, moments and weight, of which a part was written."""
    master, weight, _ = follow.pair(dtype, shape, 0.01)
    master = master.nan_to_num(1.0, 2.0, -2.0).clamp(-1e3, 1e3)
    weight = torch.where(weight.isfinite() & (torch.arange(shape[-1]) % 7 == 0), weight.clamp(-9, 9), master.to(dtype))
    grad, exp_avg, exp_avg_sq = (torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(3))
    return master, grad, exp_avg.to(moments), exp_avg_sq.square().to(moments), weight


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", follow.DTYPES)
@pytest.mark.parametrize(("update", "moments"), MASTERS.values(), ids=MASTERS)
def test_masters_follow_and_are_stored_in_the_update(update, moments, dtype, layout, monkeypatch):
    """Equal bits to the three parts one after the other, whatever the pieces. Two graphs of compiled code may fuse a
    product and a sum in one and not in the other: one rounding more, of numbers of the size of the master."""
    monkeypatch.setattr(native_adam, "PIECE", 64)
    hyper = AdamHyper(7, 3e-3, 0.9, 0.95, 1e-8, 0.1, 0)
    shapes = ((5, 33), (16, 16), (1, 4), (0, 8))
    rows = [[LAYOUTS[layout](x) for x in master_row(dtype, moments, shape)] for shape in shapes]
    before = []
    want = [[x.clone(memory_format=torch.contiguous_format) for x in row] for row in rows]
    for number, (master, grad, exp_avg, exp_avg_sq, weight) in enumerate(want):
        follow_writes(master, weight)
        before.append(master.clone())
        update([master], [grad], [exp_avg], [exp_avg_sq], [number], hyper)
        weight.copy_(master)
    *columns, weights = (list(column) for column in zip(*rows, strict=True))
    update(*columns, list(range(len(shapes))), hyper, [0] * len(shapes), weights)
    for shape, row, expected, held in zip(shapes, rows, want, before, strict=True):
        for name, x, y in zip(("master", "gradient", "exp_avg", "exp_avg_sq", "weight"), row, expected, strict=True):
            apart = 0.0
            if update is native_adam.compiled and name == "master":  # of what was subtracted too
                apart = 2.0**-23 * (y.abs() + (held - y).abs())
            if update is native_adam.compiled and name == "weight":
                y = row[0].to(dtype)
            different = ((x.float() - y.float()).abs() > apart).nonzero().tolist()
            assert not different, f"{shape}, {name}: {len(different)} differ, the first at {different[0]}"


def test_a_fused_update_of_masters_takes_all_memory_before_it_writes(monkeypatch):
    monkeypatch.setattr(native_adam, "PIECE", 64)
    hyper = AdamHyper(7, 3e-3, 0.9, 0.95, 1e-8, 0.1, 0)

    def run(fail=()):
        row = master_row(torch.bfloat16, torch.float32, (9, 37))
        before = [x.clone() for x in row]
        with Allocator(fail) as allocator, contextlib.suppress(torch.OutOfMemoryError):
            native_adam.fused(*([x] for x in row[:4]), [0], hyper, [0], [row[4]])
        return allocator, all(torch.equal(x, y) for x, y in zip(row, before, strict=True))

    allocator, same = run()
    assert not same
    assert allocator.count > 3
    for place in range(allocator.count):
        failed, same = run([place])
        assert failed.failed
        assert same, f"allocation {place}, {failed.failed}: written before"
