"""The journal: a step that is taken back leaves everything as it was, bit by bit."""

import pytest
import torch
from torch import nn

from tests.memory.test_arena import largest_file
from tilewright.core.errors import FitError, HardwareError
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.offload.pool import OffloadPool
from tilewright.models.layerwise.view import LayerGroup

MIB = 2**20


class ArenaResidence:
    """Slices of an arena, by their names."""

    def __init__(self, arena):
        self.arena = arena

    def prefetch(self, part, *, states=False):
        self.arena.prefetch(part.name)

    def fetch(self, part, *, states=False):
        self.arena.fetch(part.name)

    def release(self, part, *, changed):
        self.arena.release(part.name, changed=changed)


def make(tier, tmp_path, num_slices=4, size=1000):
    """Slices of uneven size with a state each, in an arena, and their first values."""
    parts, states, arena = [], [], OffloadPool(tier, "cpu", folder=tmp_path)
    for i in range(num_slices):
        param = nn.Parameter(torch.randn(size + 10 * i, generator=torch.Generator().manual_seed(i)).bfloat16())
        parts.append(LayerGroup(f"layers.{i}", range(i, i + 1), (param,), ()))
        states.append(torch.randint(0, 255, (5 + i,), dtype=torch.uint8))
        arena.add(parts[i].name, {"w": param, "state": states[i]})
    arena.seal()
    return parts, states, ArenaResidence(arena), [arena.read(part.name) for part in parts]


def change(journal, residence, part, state, amount):
    residence.fetch(part)
    tensors = [part.params[0].data, state]
    journal.keep(part, [part.params[0], state])
    for tensor in tensors:
        tensor.add_(amount)
    residence.release(part, changed=True)


def assert_values(residence, parts, expected):
    for part, values in zip(parts, expected, strict=True):
        found = residence.arena.read(part.name)
        for name, value in values.items():
            wrong = (found[name] != value).nonzero()
            assert len(wrong) == 0, f"{part.name} {name}: {len(wrong)} wrong, first at {wrong[0].item()}"


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("kept_in", ["host", "disk"])
def test_steps_committed_and_taken_back(kept_in, tier, tmp_path):
    parts, states, residence, expected = make(tier, tmp_path)
    journal = RollbackBuffer(kept_in, "cpu", folder=tmp_path)
    for step, (good, reached) in enumerate([(True, 4), (False, 3), (False, 0), (True, 4), (False, 1), (False, 4)]):
        journal.begin()
        for part, state in list(zip(parts, states, strict=True))[:reached]:
            change(journal, residence, part, state, step + 1)
        if good:
            journal.commit()
            for values in expected:
                for value in values.values():
                    value.add_(step + 1)
        else:
            journal.rollback(residence)
        residence.arena.flush()
        assert_values(residence, parts, expected)
    assert journal.num_bytes[kept_in] >= sum(v.nbytes for values in expected for v in values.values())
    journal.close()
    residence.arena.close()


def test_a_slice_is_kept_once_a_step(tmp_path):
    parts, states, residence, _ = make("device", tmp_path)
    journal = RollbackBuffer("host", "cpu")
    journal.begin()
    change(journal, residence, parts[0], states[0], 1)
    with pytest.raises(AssertionError, match=r"layers\.0 is kept already"):
        journal.keep(parts[0], [parts[0].params[0]])
    journal.begin()
    journal.keep(parts[0], [parts[0].params[0]])  # other tensors than before
    journal.close()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="folder"):
        RollbackBuffer("disk", "cpu")


def test_disk_is_full(tmp_path):
    parts, states, residence, expected = make("device", tmp_path, size=4 * MIB)
    journal = RollbackBuffer("disk", "cpu", folder=tmp_path)
    journal.begin()
    with largest_file(MIB), pytest.raises(FitError, match="disk tier is full"):
        change(journal, residence, parts[0], states[0], 1)
    assert_values(residence, parts, expected)
    journal.close()


def test_disk_fails_in_a_later_step(tmp_path):
    parts, states, residence, _ = make("device", tmp_path, size=MIB)
    journal = RollbackBuffer("disk", "cpu", folder=tmp_path)
    for limit in (16 * MIB, MIB):
        journal.begin()
        with largest_file(limit):
            change(journal, residence, parts[0], states[0], 1)
            if limit == MIB:
                with pytest.raises(HardwareError, match="cannot be written"):
                    journal.rollback(residence)
                with pytest.raises(HardwareError, match="cannot be written"):
                    journal.rollback(residence)
            else:
                journal.rollback(residence)
    journal.close()


def test_large_slices_share_two_buffers(tmp_path):
    parts, states, residence, expected = make("disk", tmp_path, num_slices=6, size=MIB)
    journal = RollbackBuffer("disk", "cpu", folder=tmp_path)
    journal.begin()
    for part, state in zip(parts, states, strict=True):
        change(journal, residence, part, state, 3)
    assert journal.num_bytes["host"] < 2 * (2 * MIB + 2048)
    journal.rollback(residence)
    assert_values(residence, parts, expected)
    journal.close()
    residence.arena.close()
