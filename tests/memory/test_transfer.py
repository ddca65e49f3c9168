"""The GPU's transfer, its streams played by stand-ins that do nothing: which bytes go where, and what waits for what.

The CPU copies at once, so this does not show a missing wait; tests/gpu/test_tiers_cuda.py does, on a GPU.
"""

import random
from contextlib import contextmanager

import pytest
import torch

from tilewright.memory.offload import pool as arena_module
from tilewright.memory.offload.pool import OffloadPool
from tilewright.memory.offload.transfer import CudaTransfer


@pytest.fixture
def log(monkeypatch):
    """Calls of streams and events in order; `torch.cuda` here has just what the transfer may use."""
    calls = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_event(self, event):
            calls.append("wait")

        def synchronize(self):
            calls.append("synchronize")

    class Event:
        def record(self, stream):
            calls.append("record")

    @contextmanager
    def entered(_):
        yield

    for name, value in {"Stream": Stream, "Event": Event, "device": entered, "stream": entered}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(arena_module, "make_transfer", CudaTransfer)
    return calls


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_bytes_go_both_ways(tier, log, tmp_path):
    draw, expected = random.Random(0), [float(i) for i in range(4)]
    with OffloadPool(tier, "cpu", folder=tmp_path) as pool:
        for i in range(4):
            pool.add(i, {"w": torch.full((100 + i,), float(i))})
        pool.seal()
        for _ in range(60):
            key = draw.randrange(4)
            pool.prefetch(draw.randrange(4))
            with pool.using(key, changed=True) as tensors:
                assert tensors["w"].unique().tolist() == [expected[key]]
                tensors["w"].add_(1)
                expected[key] += 1
        pool.flush()
        assert [pool.read(i)["w"].unique().tolist() for i in range(4)] == [[value] for value in expected]
        slot_bytes = pool.num_bytes["device"]
        assert pool.num_bytes["host"] - (pool.num_bytes[tier] if tier == "host" else 0) == (
            slot_bytes if tier == "disk" else 0
        ), "page-locked memory in front of the disk, and none in front of the host"
    assert log.count("synchronize") > 60


def test_copies_wait_for_the_computation(log, tmp_path):
    with OffloadPool("host", "cpu", prefetch=0) as pool:
        for i in range(2):
            pool.add(i, {"w": torch.zeros(10)})
        pool.seal()
        pool.fetch(0)
        assert log == ["synchronize"], "a new buffer: nothing to wait for"
        pool.release(0, changed=True)
        pool.flush()
        assert log == ["synchronize", "record", "wait", "synchronize"]
        pool.fetch(1)
        assert log[4:] == ["wait", "synchronize"], "the buffer was in use"
