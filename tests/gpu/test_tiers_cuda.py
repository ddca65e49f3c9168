"""Tiers of a CUDA device: bytes survive the way to the host or disk and back, in any order, beside computation.

Copies run on streams of their own, so each test lets the device compute on a slice right before it is let go and right
after it has come, with work queued in front, so that a missing wait shows as wrong numbers. Run with `pytest -m gpu`.
"""

import random

import pytest
import torch
from torch import nn

from tests.gpu.device import ON_A_GPU
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.offload.pinned_memory import pinned_empty, unpin
from tilewright.memory.offload.pool import OffloadPool
from tilewright.models.layerwise.layer_view import LayerGroup

pytestmark = ON_A_GPU
SIZE = 4 * 2**20


def make_arena(tier, folder, prefetch=1, num_slices=6):
    pool = OffloadPool(tier, "cuda", folder=folder, prefetch=prefetch)
    layer_groups = {i: {"w": nn.Parameter(torch.full((SIZE + i,), float(i), device="cuda"))} for i in range(num_slices)}
    for key, tensors in layer_groups.items():
        pool.add(key, tensors)
    pool.seal()
    return pool, layer_groups


def keep_busy():
    """Some 10 ms of work in the queue of the device."""
    torch.cuda._sleep(20_000_000)


@pytest.mark.parametrize("tier", ["host", "disk"])
class TestArena:
    def test_values_survive_any_order(self, tier, tmp_path):
        for prefetch in (0, 1, 2):
            pool, layer_groups = make_arena(tier, tmp_path, prefetch)
            expected, draw = [float(key) for key in layer_groups], random.Random(prefetch)
            for turn in range(60):
                key = draw.choice(list(layer_groups))
                pool.prefetch(draw.choice(list(layer_groups)))
                changed = draw.random() < 0.6
                with pool.using(key, changed=changed) as tensors, torch.no_grad():
                    low, high = tensors["w"].aminmax()
                    assert low.item() == high.item() == expected[key], (turn, key, expected[key])
                    if changed:
                        keep_busy()
                        tensors["w"].add_(1)
                        expected[key] += 1
            pool.flush()
            for key in layer_groups:
                value = pool.read(key)["w"]
                assert value.device.type == "cpu"
                assert value.unique().tolist() == [expected[key]]
            pool.close()

    def test_a_buffer_is_not_filled_while_it_is_read(self, tier, tmp_path):
        """A slice that was not changed is let go while the device still has to read it."""
        pool, layer_groups = make_arena(tier, tmp_path, prefetch=1)
        sums = []
        for key in [*layer_groups, *reversed(layer_groups)]:
            tensors = pool.fetch(key)
            pool.prefetch((key + 1) % len(layer_groups))
            keep_busy()
            sums.append((key, tensors["w"].double().sum()))
            pool.release(key, changed=False)
        for key, total in sums:
            assert total.item() == key * (SIZE + key)
        pool.close()

    def test_parameters_stay_where_gradients_find_them(self, tier, tmp_path):
        pool, layer_groups = make_arena(tier, tmp_path)
        param = layer_groups[2]["w"]
        with pool.using(2, changed=True):
            (param * 3).sum().backward()
            with torch.no_grad():
                param -= param.grad
        assert param.device.type == "cuda"
        assert param.isnan().all()
        assert pool.read(2)["w"].unique().tolist() == [-1.0]
        pool.close()

    def test_first_values_are_made_on_the_host(self, tier, tmp_path):
        from tilewright.memory.offload.flat_layout import placeholder

        def fill(tensors):
            assert all(tensor.device.type == "cpu" for tensor in tensors.values())
            for tensor in tensors.values():
                tensor.fill_(7)

        pool = OffloadPool(tier, "cuda", folder=tmp_path)
        tensors = {name: nn.Parameter(placeholder((1000, 3), torch.bfloat16, "cuda")) for name in ("here", "away")}
        pool.add("resident", {"here": tensors["here"]}, fill=fill, resident=True)
        pool.add("moving", {"away": tensors["away"]}, fill=fill)
        pool.seal()
        assert (tensors["here"] == 7).all()
        with pool.using("moving", changed=False):
            assert (tensors["away"] == 7).all()
            assert tensors["away"].is_cuda
        pool.close()


def test_slices_move_between_all_tiers_while_the_device_computes(tmp_path):
    """Right after a change that the device is still at, a slice goes to another tier; its bytes are those changed."""
    draw, tiers = random.Random(0), ("device", "host", "disk")
    pool = OffloadPool("device", "cuda", folder=tmp_path, prefetch=1)
    layer_groups = {i: {"w": nn.Parameter(torch.full((SIZE + i,), float(i), device="cuda"))} for i in range(5)}
    expected = [float(key) for key in layer_groups]
    for key, tensors in layer_groups.items():
        pool.add(key, tensors, tier=draw.choice(tiers))
    pool.seal()
    for turn in range(80):
        key = draw.choice(list(layer_groups))
        pool.prefetch(draw.choice(list(layer_groups)))
        with pool.using(key, changed=True) as tensors, torch.no_grad():
            low, high = tensors["w"].aminmax()
            assert low.item() == high.item() == expected[key], (turn, key)
            keep_busy()
            tensors["w"].add_(1)
            expected[key] += 1
        if draw.random() < 0.5:
            pool.move(key, draw.choice(tiers))
    assert [pool.read(key)["w"].unique().tolist() for key in layer_groups] == [[value] for value in expected]
    for key in layer_groups:
        pool.move(key, "device")
    assert pool.num_bytes["host"] == pool.num_bytes["disk"] == 0
    assert all(tensors["w"].is_cuda for tensors in layer_groups.values())
    pool.close()


def test_memory_on_the_device_is_that_of_the_staging_buffers(tmp_path):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    pool, _ = make_arena("host", tmp_path, prefetch=1, num_slices=20)
    held = torch.cuda.memory_allocated() - before
    assert pool.num_bytes["device"] <= held < pool.num_bytes["device"] + 2**20
    pool.close()


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

    rollback = RollbackBuffer(kept_in, "cuda", folder=tmp_path)
    params = [nn.Parameter(torch.full((SIZE + i,), float(i), device="cuda")) for i in range(5)]
    for _ in range(2):
        rollback.begin()
        for index, param in enumerate(params):
            keep_busy()
            rollback.save(LayerGroup(f"layers.{index}", range(0), (param,), ()), [param])
            with torch.no_grad():
                param.add_(100)
        rollback.rollback(Here())
        for index, param in enumerate(params):
            assert param.detach().unique().tolist() == [float(index)]
    rollback.close()
