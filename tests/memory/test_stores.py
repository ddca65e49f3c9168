"""Stores against a dictionary of bytes: rooms come, go and change, and none holds what is another's."""

import ctypes
import errno
import os
import random
from types import SimpleNamespace

import pytest
import torch

from tests.memory.test_arena import largest_file
from tilewright.core.errors import FitError
from tilewright.memory.offload.byte_stores import DiskStore, HostStore, make_store

MIB = 2**20
CPU = torch.device("cpu")


def noise(size, seed):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def content(store, key):
    found = torch.zeros(store.sizes[key], dtype=torch.uint8)
    store.read(key, [found])
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_rooms_come_and_go(tier, seed, tmp_path):
    store, draw, expected = make_store(tier, CPU, tmp_path), random.Random(seed), {}
    for turn in range(200):
        key = draw.randrange(8)
        if key in expected and draw.random() < 0.3:
            store.give_back([key])
            del expected[key]
        elif key in expected:
            size = len(expected[key])
            pieces = noise(size, turn).split([size // 3, size - size // 3])
            store.write(key, pieces)
            expected[key] = torch.cat(pieces)
        else:
            size = draw.choice([0, 1, 100, 5000])
            store.take({key: size, (key, "beside"): 10})
            store.write((key, "beside"), [noise(10, turn)])
            store.write(key, [noise(size, turn)])
            store.give_back([(key, "beside")])
            expected[key] = noise(size, turn)
        assert store.sizes == {key: len(value) for key, value in expected.items()}
        assert store.num_bytes == sum(map(len, expected.values()))
        wrong = [key for key, value in expected.items() if not torch.equal(content(store, key), value)]
        assert wrong == [], turn
    store.give_back(list(expected))
    assert store.num_bytes == 0
    if tier == "disk":
        assert os.fstat(store.fileno()).st_size == 0
    store.close()


def test_a_room_that_is_large_enough_stays(tmp_path):
    store, waited = DiskStore(tmp_path), []
    for size, room in ((100, 100), (40, 100), (300, 300)):
        store.fit("x", size, lambda: waited.append("x"))
        assert store.sizes == {"x": room}
    assert waited == ["x"], "before a room is replaced, and only then"
    store.close()


def test_a_file_without_holes_does_not_grow_for_ever(tmp_path, monkeypatch):
    """Rooms that were returned are taken again, where the file system has no other way to use their blocks."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=lambda *_: -1))
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EOPNOTSUPP)
    store = DiskStore(tmp_path)
    store.take(dict.fromkeys(range(4), 1000))
    for turn in range(20):
        store.give_back([turn % 4])
        store.take({turn % 4: 1000})
        store.write(turn % 4, [noise(1000, turn)])
    assert os.fstat(store.fileno()).st_size == 4000
    assert all(torch.equal(content(store, turn % 4), noise(1000, turn)) for turn in range(16, 20))
    store.close()


def test_rooms_without_bytes_lie_anywhere(tmp_path):
    store = DiskStore(tmp_path)
    store.take({"a": 0, 1: 0, "b": 10, (2, 3): 0, "c": 20})
    store.give_back(["b"])
    store.take({"d": 0, "e": 4})
    store.write("c", [noise(20, 0)])
    store.write("e", [noise(4, 1)])
    assert torch.equal(content(store, "c"), noise(20, 0))
    store.give_back(["a", 1, "c"])
    assert torch.equal(content(store, "e"), noise(4, 1))
    store.close()


def test_a_full_disk_gives_all_back_that_was_taken(tmp_path):
    store = DiskStore(tmp_path)
    store.take({"a": MIB})
    with (
        largest_file(3 * MIB),
        pytest.raises(FitError, match="Disk is full: no room for the offloaded tensors") as caught,
    ):
        store.take({"b": MIB, "c": 4 * MIB})
    assert "5.00 MiB" in caught.value.problems[0].need
    assert store.sizes == {"a": MIB}
    assert os.fstat(store.fileno()).st_size == MIB
    store.close()


def test_more_pieces_than_one_system_call_takes(tmp_path):
    store = DiskStore(tmp_path)
    store.take({0: 3000 * 5})
    pieces = [torch.full((5,), i % 251, dtype=torch.uint8) for i in range(3000)]
    store.write(0, pieces)
    found = [torch.zeros(5, dtype=torch.uint8) for _ in range(3000)]
    store.read(0, found)
    assert all(torch.equal(a, b) for a, b in zip(found, pieces, strict=True))
    store.close()


def test_system_moves_less_than_it_was_asked_to(tmp_path, monkeypatch):
    """Linux moves at most 2 GiB a call: here at most 7 bytes."""
    store = DiskStore(tmp_path)
    store.take({"before": 3, 0: 40})
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda f, views, at: pwritev(f, [views[0][:7]], at))
    monkeypatch.setattr(os, "preadv", lambda f, views, at: preadv(f, [views[0][:7]], at))
    pieces = list(torch.arange(40, dtype=torch.uint8).split([11, 0, 29]))
    store.write(0, pieces)
    found = [torch.zeros_like(piece) for piece in pieces]
    store.read(0, found)
    assert torch.equal(torch.cat(found), torch.arange(40, dtype=torch.uint8))
    store.close()


def test_host_memory_that_is_not_there():
    store = HostStore(CPU)
    with pytest.raises(FitError, match="Host memory is too small for the offloaded tensors"):
        store.take({0: 2**61, 1: 2**61})
    assert store.sizes == {}
