"""The layer-input store: what comes back, what it weighs, and a disk that fails."""

import errno
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tilewright.core.errors import ConfigError, FitError, HardwareError
from tilewright.formats.quantize import quantize
from tilewright.formats.tiled import FP8_ROW
from tilewright.memory.offload.activation_stores import CudaDiskActivations, HostActivations
from tilewright.memory.offload.activations import ActivationStore
from tilewright.ops.kernels import Kernels

TIERS = ("device", "host", "disk")


def make_store(tier, tmp_path, kind="exact"):
    return ActivationStore(tier, "cpu", kind, kernels=Kernels.default(), folder=tmp_path)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gives_back_the_same_bits_in_any_order(tier, dtype, tmp_path):
    store = make_store(tier, tmp_path)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):  # uneven micro-batches, and other sizes in each step
        inputs = {
            (layer, micro): torch.randn(2 + micro + step, 5, 33, generator=generator).to(dtype)
            for layer in range(3)
            for micro in range(4)
        }
        for key, x in inputs.items():
            store.put(*key, x)
        assert store.num_bytes == {tier: sum(x.nbytes for x in inputs.values())}
        for _ in range(2):  # backward in two passes
            for key in reversed(inputs):
                store.prefetch(*key)
                torch.testing.assert_close(store.get(*key), inputs[key], rtol=0, atol=0)
        for key in inputs:
            store.drop(*key)
        assert store.num_bytes == {tier: 0}
    store.close()


@pytest.mark.parametrize("tier", TIERS)
def test_eight_bits_are_those_of_the_format(tier, tmp_path):
    x = torch.randn(3, 7, 300, dtype=torch.bfloat16)
    store = make_store(tier, tmp_path, "fp8")
    store.put(0, 0, x)
    store.put(1, 0, x, exact=True)
    tiled = quantize(x.reshape(-1, 300), FP8_ROW)
    torch.testing.assert_close(store.get(0, 0), tiled.dequantize(torch.bfloat16).view(x.shape), rtol=0, atol=0)
    torch.testing.assert_close(store.get(1, 0), x, rtol=0, atol=0)
    assert store.num_bytes == {tier: 21 * (300 + 3 * 4) + x.nbytes}, "a byte per element and a scale a 1x128 tile"
    store.close()


def test_a_view_does_not_keep_what_it_is_a_view_of(tmp_path):
    store = make_store("device", tmp_path)
    store.put(0, 0, torch.zeros(1000, 8)[:2])
    assert store.get(0, 0).untyped_storage().nbytes() == 2 * 8 * 4


def test_what_comes_out_may_get_a_graph_without_the_kept_one_getting_it(tmp_path):
    store = make_store("device", tmp_path)
    store.put(0, 0, torch.zeros(2, 8))
    store.get(0, 0).requires_grad_()
    assert not store.get(0, 0).requires_grad


def test_a_step_that_is_given_up_leaves_nothing(tmp_path):
    store = make_store("disk", tmp_path)
    for layer in range(3):
        store.put(layer, 0, torch.zeros(100, 8))
    store.prefetch(1, 0)
    store.clear()
    assert store.num_bytes == {"disk": 0}
    with pytest.raises(KeyError):
        store.get(1, 0)


def test_the_file_is_as_large_as_one_step_and_has_no_name(tmp_path):
    store = make_store("disk", tmp_path)
    for _ in range(5):
        for layer in range(4):
            store.put(layer, 0, torch.zeros(100, 8))
        store.clear()
    assert os.fstat(store._keepers["disk"].store.fileno()).st_size == 4 * 100 * 8 * 4
    assert list(tmp_path.iterdir()) == []
    store.close()


class TestBadDisk:
    def test_full_at_the_start_and_later(self, tmp_path, monkeypatch):
        store = make_store("disk", tmp_path)
        store.put(0, 0, torch.zeros(10, 8))

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(FitError, match="Disk is full: no room for the offloaded tensors") as caught:
            store.put(1, 0, torch.zeros(10, 8))
        assert "memory.offload_dir" in str(caught.value)
        assert store.get(0, 0).shape == (10, 8)

    def test_a_limit_on_file_size_is_a_full_disk(self, tmp_path):
        resource = pytest.importorskip("resource")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        store = make_store("disk", tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
        try:
            with pytest.raises(FitError, match="Disk is full: no room for the offloaded tensors"):
                store.put(0, 0, torch.zeros(2**16))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def test_a_write_that_fails_is_told_at_the_latest_when_it_is_read(self, tmp_path, monkeypatch):
        store = make_store("disk", tmp_path)

        def broken(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "pwritev", broken)
        store.put(0, 0, torch.zeros(10, 8))
        with pytest.raises(HardwareError, match="Offload file cannot be written"):
            store.get(0, 0)

    def test_truncated_under_us(self, tmp_path):
        store = make_store("disk", tmp_path)
        store.put(0, 0, torch.ones(10, 8))
        store.get(0, 0)
        os.ftruncate(store._keepers["disk"].store.fileno(), 16)
        with pytest.raises(HardwareError, match="the file ends at byte 16 of 320"):
            store.get(0, 0)

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError) as caught:
            ActivationStore("disk", "cpu", folder=tmp_path / "file")
        assert str(tmp_path / "file") in str(caught.value)


def test_each_layer_in_its_own_tier_and_another_one_later(tmp_path):
    store = ActivationStore({0: "disk", 2: "host"}, "cpu", folder=tmp_path)
    x = torch.arange(6.0)
    first, later = ["disk", "device", "host"], ["device", "host", "disk"]
    for tiers in (first, later, first):
        assert [store.tier_of(layer) for layer in range(3)] == tiers
        for layer in range(3):
            store.put(layer, 0, x + layer)
            store.put(layer, 1, x - layer, here=True)
        assert store.num_bytes == {"disk": x.nbytes, "host": x.nbytes, "device": 4 * x.nbytes}
        with pytest.raises(AssertionError, match="between steps"):
            store.place("device")
        for layer in reversed(range(3)):
            for micro, sign in enumerate((1, -1)):
                store.prefetch(layer, micro)
                assert torch.equal(store.get(layer, micro), x + sign * layer)
                store.drop(layer, micro)
        store.place(dict(enumerate(later if tiers is first else first)))
    store.place("device")
    assert store.num_bytes == {"device": 0}, "the others' room is returned"
    store.close()


def test_a_folder_that_cannot_be_written_leaves_the_tiers_as_they_were(tmp_path):
    (tmp_path / "file").write_text("")
    store = ActivationStore("host", "cpu", folder=tmp_path / "file")
    with pytest.raises(ConfigError):
        store.place({0: "disk"})
    assert store.tier_of(0) == "host"
    store.put(0, 0, torch.ones(3))
    assert store.num_bytes == {"host": 12}
    with pytest.raises(ValueError, match="folder"):
        ActivationStore("host", "cpu").place("disk")


def test_what_could_not_be_put_is_not_there(tmp_path, monkeypatch):
    """Clearing after a failure finds what was put before it, and nothing else; the file starts afresh."""
    store = make_store("disk", tmp_path)
    store.put(0, 0, torch.ones(4))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda tensor: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
        with pytest.raises(torch.OutOfMemoryError):
            store.put(0, 1, torch.ones(4))
    store.clear()
    assert store.num_bytes == {"disk": 0}
    store.put(1, 0, torch.full((4,), 2.0))
    assert store.get(1, 0).tolist() == [2.0] * 4
    store.close()


def test_layers_that_leave_the_disk_give_their_room_back(tmp_path):
    store = ActivationStore("disk", "cpu", folder=tmp_path)
    for layer in range(3):
        store.put(layer, 0, torch.zeros(100))
    file = store._keepers["disk"].store
    store.clear()
    assert file.num_bytes == 1200, "kept for the next step"
    store.place({0: "disk"})
    assert file.num_bytes == os.fstat(file.fileno()).st_size == 400
    store.close()


def test_host_memory_of_a_gpu(monkeypatch):
    """Its streams are stand-ins that copy at once; tests/gpu shows that copies wait where they must."""
    event = SimpleNamespace(query=lambda: False, synchronize=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda: event)
    waited = []
    stand_ins = {
        "Stream": lambda device: stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda device: stream,
        "synchronize": waited.append,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    tier = HostActivations(torch.device("cpu"))
    for size in (300, 200, 500):
        for key in ((0, 0), (0, 1), (1, 0)):
            qdata, scales = torch.full((size, 3), sum(key) + size).to(torch.uint8), torch.randn(size)
            tier.put(key, [qdata, scales])
            tier.prefetch(key)
            for _ in range(2):
                assert all(torch.equal(a, b) for a, b in zip(tier.get(key), (qdata, scales), strict=True))
            tier.drop(key)
        held = {300: 300, 200: 300, 500: 500}[size]
        assert 3 * held * 7 <= tier.num_bytes < 3 * (held * 7 + 512), "buffers stay, and grow where they are too small"
    assert len(waited) == 3, "before each buffer was replaced"
    tier.forget(lambda layer: layer == 0)
    assert list(tier.store.sizes) == [(1, 0)]
    tier.close()
    assert tier.num_bytes == 0


def test_a_disk_of_a_gpu(tmp_path, monkeypatch):
    """Its streams are stand-ins that copy at once: bytes pass through registered memory of bounded size, a write waits
    for its copy, a copy back for the computation, and no copy stops it."""
    calls = []

    class Stream:
        def __init__(self, device):
            self.record_event = lambda: SimpleNamespace(synchronize=lambda: calls.append("copied"))

        def wait_stream(self, other):
            calls.append("down waits")

        def wait_event(self, event):
            calls.append("up waits")

        def synchronize(self):
            calls.append("arrived")

    inside = {"stream": lambda _: nullcontext(), "device": lambda _: nullcontext()}
    for name, value in {"Stream": Stream, "current_stream": Stream, **inside}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("a copy through memory that is not registered"))
    tier = CudaDiskActivations(tmp_path, torch.device("cpu"))
    for size in (300, 200, 500):
        keys = [(layer, micro) for layer in range(2) for micro in range(3)]
        kept = {key: [torch.full((size, 3), sum(key)).to(torch.uint8), torch.randn(size)] for key in keys}
        for key, tensors in kept.items():
            tier.put(key, tensors)
        for key in reversed(keys):
            tier.prefetch(key)
        for key in reversed(keys):
            assert all(torch.equal(a, b) for a, b in zip(tier.get(key), kept[key], strict=True))
        tier.prefetch(keys[0])  # and not asked for
        for key in keys:
            tier.drop(key)
        assert tier.num_bytes == 0
        tier.idle()
        assert tier._buffers.num_bytes <= 3 * (500 * 7 + 512), "two on their way to the file, one back"
    assert [calls.count(call) for call in ("down waits", "copied")] == [18, 18]
    assert calls.count("up waits") == calls.count("arrived") in range(18, 22)
    tier.close()
    assert tier._buffers.num_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_of_a_gpu_that_fails_is_said_and_gives_all_back(tmp_path, monkeypatch):
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    stream = SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None, synchronize=lambda: None)
    stream.record_event = lambda: stream
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    tier = CudaDiskActivations(tmp_path, torch.device("cpu"))
    tier.put((0, 0), [torch.ones(10)])
    tier.idle()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
        tier.put((0, 1), [torch.ones(10)])
        with pytest.raises(HardwareError, match="cannot be written"):
            tier.idle()
    assert tier.get((0, 0))[0].tolist() == [1.0] * 10
    tier.close()
    assert tier._buffers.num_bytes == 0
