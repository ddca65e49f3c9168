"""Slices in tiers of their own, and slices that change their tier: no value is lost, no room is kept."""

import ctypes
import errno
import os
import random
from types import SimpleNamespace

import pytest
import torch

from tests.memory.test_arena import assert_equal, copies, file_of, largest_file, make_slices
from tilewright.core.errors import FitError, HardwareError
from tilewright.memory.offload.layout import Layout
from tilewright.memory.offload.pool import OffloadPool

TIERS = ("device", "host", "disk")
MIB = 2**20


def mixed(tmp_path, slices, tiers, prefetch=1):
    arena = OffloadPool("device", "cpu", folder=tmp_path / "tier", prefetch=prefetch)
    for (key, tensors), tier in zip(slices.items(), tiers, strict=True):
        arena.add(key, tensors, tier=tier)
    arena.seal()
    return arena


def size(tensors):
    return Layout.of(tensors).num_bytes


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_use_change_and_move(seed, tmp_path):
    """What is fetched is what was last written to it, wherever it went in between."""
    draw = random.Random(seed)
    slices = make_slices()
    expected = copies(slices)
    homes = [draw.choice(TIERS) for _ in slices]
    with mixed(tmp_path, slices, homes, prefetch=draw.randrange(3)) as arena:
        for turn in range(150):
            key = draw.choice(list(slices))
            if draw.random() < 0.15:
                homes[key] = draw.choice(TIERS)
                arena.move(key, homes[key])
            for _ in range(draw.randrange(3)):
                arena.prefetch(draw.choice(list(slices)))
            changed = draw.random() < 0.5
            with arena.using(key, changed=changed) as tensors, torch.no_grad():
                assert_equal(tensors, expected[key], (turn, key))
                assert all(tensors[name] is slices[key][name] for name in tensors), "the tensors themselves"
                if changed:
                    for name, tensor in tensors.items():
                        tensor.add_(1)
                        expected[key][name] += 1
            seen = draw.choice(list(slices))
            assert_equal(arena.read(seen), expected[seen], (turn, "read", seen))
        assert [arena.tier_of(key) for key in slices] == homes
        for tier in ("host", "disk"):
            there = sum(size(tensors) for key, tensors in slices.items() if homes[key] == tier)
            assert arena.num_bytes[tier] == there


def test_buffers_are_those_of_what_is_off_the_device(tmp_path):
    slices = make_slices()
    with mixed(tmp_path, slices, ["device", "host", "disk", "host", "device"]) as arena:
        home = sum(t.nbytes for key in (0, 4) for t in slices[key].values())
        assert arena.num_bytes["device"] == home + 2 * size(slices[3])
        arena.move(3, "device")
        arena.fetch(2)
        home += sum(t.nbytes for t in slices[3].values())
        assert arena.num_bytes["device"] == home + 2 * size(slices[2]), "the largest one has left"
        arena.release(2, changed=False)
        arena.move(1, "device")
        arena.move(2, "device")
        assert arena.num_bytes == {"device": sum(t.nbytes for s in slices.values() for t in s.values())} | {
            "host": 0,
            "disk": 0,
        }
        assert not arena.travels


def test_room_on_disk_is_given_back_slice_by_slice(tmp_path):
    slices = {i: {"w": torch.full((MIB,), float(i))} for i in range(3)}
    with mixed(tmp_path, slices, ["disk"] * 3) as arena:
        file = os.dup(file_of(arena))
        held = []
        for key in (1, 0, 2):
            held.append(os.fstat(file).st_blocks * 512)
            arena.move(key, "host")
        os.close(file)
        assert [round(size / (4 * MIB)) for size in held] == [3, 2, 1]
        assert arena.num_bytes["disk"] == 0
        assert [int(arena.read(key)["w"][0]) for key in slices] == [0, 1, 2]


def test_a_disk_without_holes_and_a_disk_that_fails(tmp_path, monkeypatch):
    slices = {i: {"w": torch.full((MIB,), float(i))} for i in range(3)}
    with mixed(tmp_path, slices, ["disk"] * 3) as arena:
        for key, fault in ((0, errno.EOPNOTSUPP), (1, errno.EIO)):
            with monkeypatch.context() as patch:
                patch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=lambda *_: -1))
                patch.setattr(ctypes, "get_errno", lambda fault=fault: fault)
                if fault == errno.EIO:
                    with pytest.raises(HardwareError, match="cannot be given back"):
                        arena.move(key, "device")
                else:
                    arena.move(key, "device")
            assert arena.tier_of(key) == "device"
        assert [int(arena.read(key)["w"][0]) for key in slices] == [0, 1, 2]


def test_a_tier_without_room_leaves_the_slice_where_it_is(tmp_path):
    slices = {i: {"w": torch.full((MIB,), float(i))} for i in range(2)}
    with mixed(tmp_path, slices, ["device", "host"]) as arena:
        for key in slices:
            with largest_file(2 * MIB), pytest.raises(FitError, match="disk tier is full"):
                arena.move(key, "disk")
        assert [arena.tier_of(key) for key in slices] == ["device", "host"]
        for key in slices:
            with arena.using(key, changed=True) as tensors:
                assert (tensors["w"] == key).all()
        assert arena.num_bytes["disk"] == 0


def test_a_device_without_memory_leaves_the_slice_where_it_is(tmp_path, monkeypatch):
    slices = {0: {"a": torch.ones(5), "b": torch.full((7,), 2.0)}}
    with mixed(tmp_path, slices, ["host"]) as arena:
        moved = torch.Tensor.to
        calls = iter([True, False])

        def second_fails(tensor, *args, **kwargs):
            if next(calls):
                return moved(tensor, *args, **kwargs)
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", second_fails)
            with pytest.raises(torch.OutOfMemoryError):
                arena.move(0, "device")
        assert arena.tier_of(0) == "host"
        assert slices[0]["a"].isnan().all()
        with arena.using(0, changed=False) as tensors:
            assert tensors["a"].tolist() == [1.0] * 5
            assert tensors["b"].tolist() == [2.0] * 7


def test_misuse_is_a_bug(tmp_path):
    slices = make_slices(3)
    with OffloadPool("host", "cpu") as arena:
        with pytest.raises(ValueError, match="folder"):
            arena.add(0, slices[0], tier="disk")
        arena.add(0, slices[0])
        arena.add(1, slices[1], resident=True)
        arena.add(2, slices[2])
        arena.seal()
        with pytest.raises(AssertionError, match="without a folder"):
            arena.move(0, "disk")
        with pytest.raises(AssertionError, match="fixed"):
            arena.move(1, "host")
        with arena.using(2, changed=False), pytest.raises(AssertionError, match="none is live"):
            arena.move(0, "device")
