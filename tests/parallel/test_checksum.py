"""Checksums find any bit that differs, and ranks name the tensors and the ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import on_ranks
from tilewright.core import env
from tilewright.ops.base.tensor_parts import local, place_of
from tilewright.parallel.liveness.checksum import checksum, find_differences
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.world import join

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float64, torch.bool)


@given(st.sampled_from(DTYPES), st.integers(1, 600), st.data())
def test_any_bit_counts(dtype, size, data):
    tensor = torch.zeros(size, dtype=dtype)
    before = checksum(tensor)
    bits = tensor.view(torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(tensor) != before


def test_values_count_and_their_layout_in_memory_does_not():
    tensor = torch.arange(12.0).view(3, 4)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(torch.tensor(1.0)) == checksum(torch.ones(1, 1))
    assert checksum(torch.empty(0, 3)) == checksum(torch.empty(0, dtype=torch.int8))


def test_one_process_has_nothing_to_compare():
    assert find_differences(None, {("w", None): 1}) == []


CASES = [
    ({}, []),
    ({2: ["whole"]}, ["whole on rank 2, against ranks 0, 1, 3"]),
    ({1: ["uneven"]}, ["uneven on rank 3, against rank 1"]),  # of two, nobody knows which
    (
        {0: ["short"], 1: ["whole"], 3: ["whole"]},
        ["short on rank 2, against rank 0", "whole on ranks 1, 3, against ranks 0, 2"],
    ),
]
"""What each rank holds wrongly; what is said."""


def _compared(rank):
    """Four ranks, two replicas of two shards."""
    world = join(env.ranks(), MeshSizes(dp_replicate=2, dp_shard=2), torch.device("cpu"))
    said = []
    for wrong, _ in CASES:
        tensors = {
            "whole": torch.arange(5.0),
            "uneven": distribute_tensor(torch.arange(9.0).view(3, 3), world.mesh["dp_shard"], [Shard(0)]),
            "short": distribute_tensor(torch.arange(2.0), world.mesh["dp_shard"], [Shard(0)]),
        }
        own = {f"only {rank}": torch.tensor(rank)}  # what one rank has is compared with nothing
        for name in wrong.get(rank, ()):
            local(tensors[name])[0] += 1
        sums = {place_of(name, tensor): checksum(local(tensor)) for name, tensor in (tensors | own).items()}
        said.append([str(difference) for difference in find_differences(world.everyone.handle, sums)])
    return said


@pytest.mark.dist
def test_ranks_name_what_differs():
    for found in on_ranks(4, _compared):
        for said, (wrong, wanted) in zip(found, CASES, strict=True):
            assert said == wanted, wrong
