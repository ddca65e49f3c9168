"""The rollback buffer: a step that is taken back leaves everything as it was, bit by bit."""

import pytest
import torch
from torch import nn

from tests.memory.test_arena import largest_file
from tilewright.core.errors import FitError, HardwareError
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.offload.pool import OffloadPool
from tilewright.models.layerwise.layer_view import LayerGroup

MIB = 2**20


class ArenaResidence:
    """Layer groups of an pool, by their names."""

    def __init__(self, pool):
        self.pool = pool

    def prefetch(self, part, *, states=False):
        self.pool.prefetch(part.name)

    def fetch(self, part, *, states=False):
        self.pool.fetch(part.name)

    def release(self, part, *, changed):
        self.pool.release(part.name, changed=changed)


def make(tier, tmp_path, num_slices=4, size=1000):
    """Layer groups of uneven size with a state each, in an pool, and their initial values."""
    parts, states, pool = [], [], OffloadPool(tier, "cpu", folder=tmp_path)
    for i in range(num_slices):
        param = nn.Parameter(torch.randn(size + 10 * i, generator=torch.Generator().manual_seed(i)).bfloat16())
        parts.append(LayerGroup(f"layers.{i}", range(i, i + 1), (param,), ()))
        states.append(torch.randint(0, 255, (5 + i,), dtype=torch.uint8))
        pool.add(parts[i].name, {"w": param, "state": states[i]})
    pool.seal()
    return parts, states, ArenaResidence(pool), [pool.read(part.name) for part in parts]


def change(rollback, offloader, part, state, amount):
    offloader.fetch(part)
    tensors = [part.params[0].data, state]
    rollback.save(part, [part.params[0], state])
    for tensor in tensors:
        tensor.add_(amount)
    offloader.release(part, changed=True)


def assert_values(offloader, parts, expected):
    for part, values in zip(parts, expected, strict=True):
        found = offloader.pool.read(part.name)
        for name, value in values.items():
            wrong = (found[name] != value).nonzero()
            assert len(wrong) == 0, f"{part.name} {name}: {len(wrong)} wrong, first at {wrong[0].item()}"


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("kept_in", ["host", "disk"])
def test_steps_committed_and_taken_back(kept_in, tier, tmp_path):
    parts, states, offloader, expected = make(tier, tmp_path)
    rollback = RollbackBuffer(kept_in, "cpu", folder=tmp_path)
    for step, (good, reached) in enumerate([(True, 4), (False, 3), (False, 0), (True, 4), (False, 1), (False, 4)]):
        rollback.begin()
        for part, state in list(zip(parts, states, strict=True))[:reached]:
            change(rollback, offloader, part, state, step + 1)
        if good:
            rollback.commit()
            for values in expected:
                for value in values.values():
                    value.add_(step + 1)
        else:
            rollback.rollback(offloader)
        offloader.pool.flush()
        assert_values(offloader, parts, expected)
    assert rollback.num_bytes[kept_in] >= sum(v.nbytes for values in expected for v in values.values())
    rollback.close()
    offloader.pool.close()


def test_a_slice_is_kept_once_a_step(tmp_path):
    parts, states, offloader, _ = make("device", tmp_path)
    rollback = RollbackBuffer("host", "cpu")
    rollback.begin()
    change(rollback, offloader, parts[0], states[0], 1)
    with pytest.raises(AssertionError, match=r"layers\.0 is kept already"):
        rollback.save(parts[0], [parts[0].params[0]])
    rollback.begin()
    rollback.save(parts[0], [parts[0].params[0]])  # other tensors than before
    rollback.close()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="folder"):
        RollbackBuffer("disk", "cpu")


def test_disk_is_full(tmp_path):
    parts, states, offloader, expected = make("device", tmp_path, size=4 * MIB)
    rollback = RollbackBuffer("disk", "cpu", folder=tmp_path)
    rollback.begin()
    with largest_file(MIB), pytest.raises(FitError, match="Disk is full: no room for the offloaded tensors"):
        change(rollback, offloader, parts[0], states[0], 1)
    assert_values(offloader, parts, expected)
    rollback.close()


def test_disk_fails_in_a_later_step(tmp_path):
    parts, states, offloader, _ = make("device", tmp_path, size=MIB)
    rollback = RollbackBuffer("disk", "cpu", folder=tmp_path)
    for limit in (16 * MIB, MIB):
        rollback.begin()
        with largest_file(limit):
            change(rollback, offloader, parts[0], states[0], 1)
            if limit == MIB:
                with pytest.raises(HardwareError, match="cannot be written"):
                    rollback.rollback(offloader)
                with pytest.raises(HardwareError, match="cannot be written"):
                    rollback.rollback(offloader)
            else:
                rollback.rollback(offloader)
    rollback.close()


def test_large_slices_share_two_buffers(tmp_path):
    parts, states, offloader, expected = make("disk", tmp_path, num_slices=6, size=MIB)
    rollback = RollbackBuffer("disk", "cpu", folder=tmp_path)
    rollback.begin()
    for part, state in zip(parts, states, strict=True):
        change(rollback, offloader, part, state, 3)
    assert rollback.num_bytes["host"] < 2 * (2 * MIB + 2048)
    rollback.rollback(offloader)
    assert_values(offloader, parts, expected)
    rollback.close()
    offloader.pool.close()
