"""Masters that follow writes to their weights: by the bits of each element, in any layout of memory."""

import pytest
import torch

from tests.ops.follow import DTYPES, SHAPES, pair, same_bits
from tilewright.ops.backends.ref.follow_writes import follow_writes

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "every second": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_written_becomes_the_master(dtype, shape, layout):
    for share in (0.0, 0.01, 1.0):
        master, weight, want = pair(dtype, shape, share)
        stored = weight.clone()
        master, weight = LAYOUTS[layout](master), LAYOUTS[layout](weight)
        follow_writes(master, weight)
        assert same_bits(master.contiguous(), want), f"{share} written: {(master != want).nonzero()[:3].tolist()}"
        assert torch.equal(weight.view(torch.int16), stored.view(torch.int16)), "the weight is read alone"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_number_can_be_written(dtype):
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for held in (1.0, 0.0, -0.0, 1e-9, torch.inf, torch.nan):
        master = torch.full(weight.shape, held)
        unlike = weight.view(torch.int16) != master.to(dtype).view(torch.int16)
        follow_writes(master, weight)
        assert same_bits(master, torch.where(unlike, weight.float(), held))


def test_several_threads_take_larger_pieces():
    master, weight, want = pair(torch.bfloat16, (2**20 + 3,), 1e-5)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        follow_writes(master, weight)
    finally:
        torch.set_num_threads(threads)
    assert same_bits(master, want)


def test_a_weight_that_nobody_wrote_takes_the_memory_of_a_piece():
    """Not a copy of the master: the largest weight of a model has gigabytes."""
    master = torch.randn(64, 2**16)
    weight = master.bfloat16()
    with torch.profiler.profile(profile_memory=True) as seen:
        follow_writes(master, weight)
    most = max(event.self_cpu_memory_usage for event in seen.events())
    assert most <= 2 * 2**18 * torch.get_num_threads() + 2**12, f"{most} bytes"
