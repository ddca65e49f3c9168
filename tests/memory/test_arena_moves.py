"""Layer groups in tiers of their own, and layer groups that change their tier: no value is lost, no room is kept."""

import ctypes
import errno
import os
import random
from types import SimpleNamespace

import pytest
import torch

from tests.memory.test_arena import assert_equal, copies, file_of, largest_file, make_slices
from tilewright.core.errors import FitError, HardwareError
from tilewright.memory.offload.flat_layout import Layout
from tilewright.memory.offload.pool import OffloadPool

TIERS = ("device", "host", "disk")
MIB = 2**20


def mixed(tmp_path, layer_groups, tiers, prefetch=1):
    pool = OffloadPool("device", "cpu", folder=tmp_path / "tier", prefetch=prefetch)
    for (key, tensors), tier in zip(layer_groups.items(), tiers, strict=True):
        pool.add(key, tensors, tier=tier)
    pool.seal()
    return pool


def size(tensors):
    return Layout.of(tensors).num_bytes


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_use_change_and_move(seed, tmp_path):
    """What is fetched is what was last written to it, wherever it went in between."""
    draw = random.Random(seed)
    layer_groups = make_slices()
    expected = copies(layer_groups)
    homes = [draw.choice(TIERS) for _ in layer_groups]
    with mixed(tmp_path, layer_groups, homes, prefetch=draw.randrange(3)) as pool:
        for turn in range(150):
            key = draw.choice(list(layer_groups))
            if draw.random() < 0.15:
                homes[key] = draw.choice(TIERS)
                pool.move(key, homes[key])
            for _ in range(draw.randrange(3)):
                pool.prefetch(draw.choice(list(layer_groups)))
            changed = draw.random() < 0.5
            with pool.using(key, changed=changed) as tensors, torch.no_grad():
                assert_equal(tensors, expected[key], (turn, key))
                assert all(tensors[name] is layer_groups[key][name] for name in tensors), "the tensors themselves"
                if changed:
                    for name, tensor in tensors.items():
                        tensor.add_(1)
                        expected[key][name] += 1
            seen = draw.choice(list(layer_groups))
            assert_equal(pool.read(seen), expected[seen], (turn, "read", seen))
        assert [pool.tier_of(key) for key in layer_groups] == homes
        for tier in ("host", "disk"):
            there = sum(size(tensors) for key, tensors in layer_groups.items() if homes[key] == tier)
            assert pool.num_bytes[tier] == there


def test_buffers_are_those_of_what_is_off_the_device(tmp_path):
    layer_groups = make_slices()
    with mixed(tmp_path, layer_groups, ["device", "host", "disk", "host", "device"]) as pool:
        home = sum(t.nbytes for key in (0, 4) for t in layer_groups[key].values())
        assert pool.num_bytes["device"] == home + 2 * size(layer_groups[3])
        pool.move(3, "device")
        pool.fetch(2)
        home += sum(t.nbytes for t in layer_groups[3].values())
        assert pool.num_bytes["device"] == home + 2 * size(layer_groups[2]), "the largest one has left"
        pool.release(2, changed=False)
        pool.move(1, "device")
        pool.move(2, "device")
        assert pool.num_bytes == {"device": sum(t.nbytes for s in layer_groups.values() for t in s.values())} | {
            "host": 0,
            "disk": 0,
        }
        assert not pool.is_offloaded


def test_room_on_disk_is_given_back_slice_by_slice(tmp_path):
    layer_groups = {i: {"w": torch.full((MIB,), float(i))} for i in range(3)}
    with mixed(tmp_path, layer_groups, ["disk"] * 3) as pool:
        file = os.dup(file_of(pool))
        held = []
        for key in (1, 0, 2):
            held.append(os.fstat(file).st_blocks * 512)
            pool.move(key, "host")
        os.close(file)
        assert [round(size / (4 * MIB)) for size in held] == [3, 2, 1]
        assert pool.num_bytes["disk"] == 0
        assert [int(pool.read(key)["w"][0]) for key in layer_groups] == [0, 1, 2]


def test_a_disk_without_holes_and_a_disk_that_fails(tmp_path, monkeypatch):
    layer_groups = {i: {"w": torch.full((MIB,), float(i))} for i in range(3)}
    with mixed(tmp_path, layer_groups, ["disk"] * 3) as pool:
        for key, fault in ((0, errno.EOPNOTSUPP), (1, errno.EIO)):
            with monkeypatch.context() as patch:
                patch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=lambda *_: -1))
                patch.setattr(ctypes, "get_errno", lambda fault=fault: fault)
                if fault == errno.EIO:
                    with pytest.raises(HardwareError, match="cannot be returned"):
                        pool.move(key, "device")
                else:
                    pool.move(key, "device")
            assert pool.tier_of(key) == "device"
        assert [int(pool.read(key)["w"][0]) for key in layer_groups] == [0, 1, 2]


def test_a_tier_without_room_leaves_the_slice_where_it_is(tmp_path):
    layer_groups = {i: {"w": torch.full((MIB,), float(i))} for i in range(2)}
    with mixed(tmp_path, layer_groups, ["device", "host"]) as pool:
        for key in layer_groups:
            with (
                largest_file(2 * MIB),
                pytest.raises(FitError, match="Disk is full: no room for the offloaded tensors"),
            ):
                pool.move(key, "disk")
        assert [pool.tier_of(key) for key in layer_groups] == ["device", "host"]
        for key in layer_groups:
            with pool.using(key, changed=True) as tensors:
                assert (tensors["w"] == key).all()
        assert pool.num_bytes["disk"] == 0


def test_a_device_without_memory_leaves_the_slice_where_it_is(tmp_path, monkeypatch):
    layer_groups = {0: {"a": torch.ones(5), "b": torch.full((7,), 2.0)}}
    with mixed(tmp_path, layer_groups, ["host"]) as pool:
        moved = torch.Tensor.to
        calls = iter([True, False])

        def second_fails(tensor, *args, **kwargs):
            if next(calls):
                return moved(tensor, *args, **kwargs)
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", second_fails)
            with pytest.raises(torch.OutOfMemoryError):
                pool.move(0, "device")
        assert pool.tier_of(0) == "host"
        assert layer_groups[0]["a"].isnan().all()
        with pool.using(0, changed=False) as tensors:
            assert tensors["a"].tolist() == [1.0] * 5
            assert tensors["b"].tolist() == [2.0] * 7


def test_misuse_is_a_bug(tmp_path):
    layer_groups = make_slices(3)
    with OffloadPool("host", "cpu") as pool:
        with pytest.raises(ValueError, match="folder"):
            pool.add(0, layer_groups[0], tier="disk")
        pool.add(0, layer_groups[0])
        pool.add(1, layer_groups[1], resident=True)
        pool.add(2, layer_groups[2])
        pool.seal()
        with pytest.raises(AssertionError, match="without a folder"):
            pool.move(0, "disk")
        with pytest.raises(AssertionError, match="fixed"):
            pool.move(1, "host")
        with pool.using(2, changed=False), pytest.raises(AssertionError, match="none is live"):
            pool.move(0, "device")
