"""Tiers of a CUDA device: bytes survive the way to the host or disk and back, in any order, beside computation.

Copies run on streams of their own, so each test lets the device compute on a slice right before it is let go and right
after it has come, with work queued in front, so that a missing wait shows as wrong numbers. Run with `pytest -m gpu`.
"""

import random

import pytest
import torch
from torch import nn

from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.offload.pinned import pinned_empty, unpin
from tilewright.memory.offload.pool import OffloadPool
from tilewright.models.layerwise.view import LayerGroup

pytestmark = pytest.mark.gpu
SIZE = 4 * 2**20


@pytest.fixture(scope="module", autouse=True)
def _cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def make_arena(tier, folder, prefetch=1, num_slices=6):
    arena = OffloadPool(tier, "cuda", folder=folder, prefetch=prefetch)
    slices = {i: {"w": nn.Parameter(torch.full((SIZE + i,), float(i), device="cuda"))} for i in range(num_slices)}
    for key, tensors in slices.items():
        arena.add(key, tensors)
    arena.seal()
    return arena, slices


def keep_busy():
    """Some 10 ms of work in the queue of the device."""
    torch.cuda._sleep(20_000_000)


@pytest.mark.parametrize("tier", ["host", "disk"])
class TestArena:
    def test_values_survive_any_order(self, tier, tmp_path):
        for prefetch in (0, 1, 2):
            arena, slices = make_arena(tier, tmp_path, prefetch)
            expected, draw = [float(key) for key in slices], random.Random(prefetch)
            for turn in range(60):
                key = draw.choice(list(slices))
                arena.prefetch(draw.choice(list(slices)))
                changed = draw.random() < 0.6
                with arena.using(key, changed=changed) as tensors, torch.no_grad():
                    low, high = tensors["w"].aminmax()
                    assert low.item() == high.item() == expected[key], (turn, key, expected[key])
                    if changed:
                        keep_busy()
                        tensors["w"].add_(1)
                        expected[key] += 1
            arena.flush()
            for key in slices:
                value = arena.read(key)["w"]
                assert value.device.type == "cpu"
                assert value.unique().tolist() == [expected[key]]
            arena.close()

    def test_a_buffer_is_not_filled_while_it_is_read(self, tier, tmp_path):
        """A slice that was not changed is let go while the device still has to read it."""
        arena, slices = make_arena(tier, tmp_path, prefetch=1)
        sums = []
        for key in [*slices, *reversed(slices)]:
            tensors = arena.fetch(key)
            arena.prefetch((key + 1) % len(slices))
            keep_busy()
            sums.append((key, tensors["w"].double().sum()))
            arena.release(key, changed=False)
        for key, total in sums:
            assert total.item() == key * (SIZE + key)
        arena.close()

    def test_parameters_stay_where_gradients_find_them(self, tier, tmp_path):
        arena, slices = make_arena(tier, tmp_path)
        param = slices[2]["w"]
        with arena.using(2, changed=True):
            (param * 3).sum().backward()
            with torch.no_grad():
                param -= param.grad
        assert param.device.type == "cuda"
        assert param.isnan().all()
        assert arena.read(2)["w"].unique().tolist() == [-1.0]
        arena.close()

    def test_first_values_are_made_on_the_host(self, tier, tmp_path):
        from tilewright.memory.offload.layout import vacant

        def fill(tensors):
            assert all(tensor.device.type == "cpu" for tensor in tensors.values())
            for tensor in tensors.values():
                tensor.fill_(7)

        arena = OffloadPool(tier, "cuda", folder=tmp_path)
        tensors = {name: nn.Parameter(vacant((1000, 3), torch.bfloat16, "cuda")) for name in ("here", "away")}
        arena.add("resident", {"here": tensors["here"]}, fill=fill, resident=True)
        arena.add("moving", {"away": tensors["away"]}, fill=fill)
        arena.seal()
        assert (tensors["here"] == 7).all()
        with arena.using("moving", changed=False):
            assert (tensors["away"] == 7).all()
            assert tensors["away"].is_cuda
        arena.close()


def test_slices_move_between_all_tiers_while_the_device_computes(tmp_path):
    """Right after a change that the device is still at, a slice goes to another tier; its bytes are those changed."""
    draw, tiers = random.Random(0), ("device", "host", "disk")
    arena = OffloadPool("device", "cuda", folder=tmp_path, prefetch=1)
    slices = {i: {"w": nn.Parameter(torch.full((SIZE + i,), float(i), device="cuda"))} for i in range(5)}
    expected = [float(key) for key in slices]
    for key, tensors in slices.items():
        arena.add(key, tensors, tier=draw.choice(tiers))
    arena.seal()
    for turn in range(80):
        key = draw.choice(list(slices))
        arena.prefetch(draw.choice(list(slices)))
        with arena.using(key, changed=True) as tensors, torch.no_grad():
            low, high = tensors["w"].aminmax()
            assert low.item() == high.item() == expected[key], (turn, key)
            keep_busy()
            tensors["w"].add_(1)
            expected[key] += 1
        if draw.random() < 0.5:
            arena.move(key, draw.choice(tiers))
    assert [arena.read(key)["w"].unique().tolist() for key in slices] == [[value] for value in expected]
    for key in slices:
        arena.move(key, "device")
    assert arena.num_bytes["host"] == arena.num_bytes["disk"] == 0
    assert all(tensors["w"].is_cuda for tensors in slices.values())
    arena.close()


def test_memory_on_the_device_is_that_of_the_staging_buffers(tmp_path):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    arena, _ = make_arena("host", tmp_path, prefetch=1, num_slices=20)
    held = torch.cuda.memory_allocated() - before
    assert arena.num_bytes["device"] <= held < arena.num_bytes["device"] + 2**20
    arena.close()


def test_registered_memory_is_exact_and_fast():
    num_bytes = 300 * 2**20 + 4096
    buffer = pinned_empty(num_bytes, torch.device("cuda"))
    assert buffer.nbytes == num_bytes
    assert buffer.is_pinned()
    unpin(buffer, torch.device("cuda"))
    assert not buffer.is_pinned()


@pytest.mark.parametrize("kept_in", ["host", "disk"])
def test_journal_takes_a_step_back(kept_in, tmp_path):
    class Here:
        def prefetch(self, part, *, states=False): ...
        def fetch(self, part, *, states=False): ...
        def release(self, part, *, changed): ...

    journal = RollbackBuffer(kept_in, "cuda", folder=tmp_path)
    params = [nn.Parameter(torch.full((SIZE + i,), float(i), device="cuda")) for i in range(5)]
    for _ in range(2):
        journal.begin()
        for index, param in enumerate(params):
            keep_busy()
            journal.keep(LayerGroup(f"layers.{index}", range(0), (param,), ()), [param])
            with torch.no_grad():
                param.add_(100)
        journal.rollback(Here())
        for index, param in enumerate(params):
            assert param.detach().unique().tolist() == [float(index)]
    journal.close()
