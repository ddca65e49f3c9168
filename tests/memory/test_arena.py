"""The pool against plain tensors: what goes in comes out, however layer groups are fetched, changed and let go."""

import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tilewright.core.errors import ConfigError, FitError, HardwareError
from tilewright.memory.offload.flat_layout import Layout, placeholder
from tilewright.memory.offload.pool import OffloadPool

TIERS = ("device", "host", "disk")
MIB = 2**20


def make_slices(num_slices=5):
    """Tensors of several dtypes and shapes, uneven layer groups, an empty tensor and a scalar."""
    generator = torch.Generator().manual_seed(0)
    layer_groups = {}
    for index in range(num_slices):
        layer_groups[index] = {
            "weight": nn.Parameter(torch.randn(7 + 100 * index, 5, generator=generator)),
            "half": nn.Parameter(torch.randn(3, 11, generator=generator).bfloat16()),
            "qdata": torch.randint(0, 255, (13 + index,), generator=generator, dtype=torch.uint8),
            "scalar": torch.randn((), generator=generator),
            "nothing": torch.empty(0, 4),
        }
    return layer_groups


def copies(layer_groups):
    return {key: {name: t.detach().clone() for name, t in tensors.items()} for key, tensors in layer_groups.items()}


def make_arena(tier, tmp_path, layer_groups, prefetch=1):
    pool = OffloadPool(tier, "cpu", folder=tmp_path / "tier", prefetch=prefetch)
    for key, tensors in layer_groups.items():
        pool.add(key, tensors)
    pool.seal()
    return pool


def assert_equal(found, expected, where):
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), (where, name)
        wrong = (found[name].detach() != value).flatten().nonzero()
        assert len(wrong) == 0, f"{where} {name}: first of {len(wrong)} wrong elements at {wrong[0].item()}"


@pytest.mark.parametrize("tier", TIERS)
class TestValues:
    def test_what_goes_in_comes_out(self, tier, tmp_path):
        layer_groups = make_slices()
        expected = copies(layer_groups)
        with make_arena(tier, tmp_path, layer_groups) as pool:
            for key in layer_groups:
                found = pool.fetch(key)
                assert_equal(found, expected[key], key)
                assert all(found[name] is layer_groups[key][name] for name in found), "the tensors themselves"
                pool.release(key, changed=False)

    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_any_order_of_use_and_change(self, tier, prefetch, tmp_path):
        layer_groups = make_slices()
        expected = copies(layer_groups)
        draw = random.Random(prefetch)
        with make_arena(tier, tmp_path, layer_groups, prefetch) as pool:
            for turn in range(120):
                key = draw.choice(list(layer_groups))
                for _ in range(draw.randrange(3)):
                    pool.prefetch(draw.choice(list(layer_groups)))
                changed = draw.random() < 0.5
                with pool.using(key, changed=changed) as tensors, torch.no_grad():
                    assert_equal(tensors, expected[key], (turn, key))
                    if changed:
                        for name, tensor in tensors.items():
                            tensor.add_(1)
                            expected[key][name] += 1
                if draw.random() < 0.2:
                    seen = draw.choice(list(layer_groups))
                    assert_equal(pool.read(seen), expected[seen], (turn, "read", seen))
                if draw.random() < 0.1:
                    pool.flush()

    def test_reading_leaves_everything_as_it_is(self, tier, tmp_path):
        layer_groups = make_slices()
        expected = copies(layer_groups)
        with make_arena(tier, tmp_path, layer_groups) as pool:
            live = pool.fetch(2)
            live["weight"].data.add_(1)
            expected[2]["weight"] += 1
            for key in layer_groups:
                assert_equal(pool.read(key), expected[key], key)
            pool.read(2)["weight"].zero_()
            assert_equal(live, expected[2], "live, after its copy was zeroed")

    def test_several_slices_are_live_at_once(self, tier, tmp_path):
        layer_groups = make_slices()
        expected = copies(layer_groups)
        with make_arena(tier, tmp_path, layer_groups, prefetch=1) as pool:
            first, second = pool.fetch(0), pool.fetch(3)
            assert_equal(first, expected[0], 0)
            assert_equal(second, expected[3], 3)
            if tier != "device":
                with pytest.raises(AssertionError, match="2 layer groups are live"):
                    pool.fetch(4)

    def test_misuse_is_a_bug(self, tier, tmp_path):
        layer_groups = make_slices(2)
        with make_arena(tier, tmp_path, layer_groups) as pool:
            with pytest.raises(AssertionError, match="not live"):
                pool.release(0, changed=True)
            pool.fetch(0)
            with pytest.raises(AssertionError, match="live already"):
                pool.fetch(0)
            with pytest.raises(AssertionError, match="added twice, or after seal"):
                pool.add(9, {})

    def test_a_tensor_of_two_slices_needs_a_resident_one(self, tier, tmp_path):
        """A head tied to the embedding: neither may take it away from the other."""
        tied = nn.Parameter(torch.randn(6, 4))
        value = tied.detach().clone()
        with OffloadPool(tier, "cpu", folder=tmp_path) as pool:
            pool.add("embed", {"embed.weight": tied})
            with pytest.raises(AssertionError, match="in layer groups 'embed' and 'head'"):
                pool.add("head", {"head.weight": tied, "norm": torch.ones(3)})
        with OffloadPool(tier, "cpu", folder=tmp_path) as pool:
            pool.add("shared", {"embed.weight": tied}, resident=True)
            pool.add("head", {"norm": torch.ones(3)})
            pool.seal()
            for key in ("head", "shared"):
                with pool.using(key, changed=True):
                    assert torch.equal(tied, value)
            assert pool.prefetch("shared")
            assert_equal(pool.read("shared"), {"embed.weight": value}, "shared")
            assert pool.num_bytes["device"] >= tied.nbytes

    def test_optimizers_and_modules_hold_on_to_their_parameters(self, tier, tmp_path):
        """Five steps of AdamW on a layer at a time equal those on plain parameters."""
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model.load_state_dict(plain.state_dict())
        params = list(model.parameters())
        x = torch.randn(4, 6)
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
        optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in model]
        layer_groups = {i: dict(layer.named_parameters()) for i, layer in enumerate(model)}
        with make_arena(tier, tmp_path, layer_groups, prefetch=0) as pool:
            for _ in range(5):
                plain(x).square().sum().backward()
                reference.step()
                reference.zero_grad()
                with pool.using(0, changed=False), torch.no_grad():
                    hidden = model[0](x)
                with pool.using(1, changed=True):
                    hidden.requires_grad_()
                    model[1](hidden).square().sum().backward()
                    optimizers[1].step()
                    optimizers[1].zero_grad()
                with pool.using(0, changed=True):
                    model[0](x).backward(hidden.grad)
                    optimizers[0].step()
                    optimizers[0].zero_grad()
            assert all(now is before for now, before in zip(model.parameters(), params, strict=True))
            for index, layer in enumerate(plain):
                found = pool.read(index)
                for name, value in layer.named_parameters():
                    gap = (found[name] - value).abs().max().item()
                    assert gap == 0, f"layer {index} {name} differs by {gap}"


@pytest.mark.parametrize("tier", ["host", "disk"])
class TestAwayFromTheDevice:
    def test_what_is_not_live_is_nan_and_takes_no_memory(self, tier, tmp_path):
        layer_groups = make_slices()
        with make_arena(tier, tmp_path, layer_groups):
            for tensors in layer_groups.values():
                assert tensors["weight"].isnan().all()
                assert tensors["half"].isnan().all()
                assert (tensors["qdata"] == 255).all()
                assert tensors["weight"].untyped_storage().nbytes() == 4
                with pytest.raises(RuntimeError, match="single memory location"):
                    tensors["weight"].data.add_(1)
            pointers = [t.data_ptr() for tensors in layer_groups.values() for t in tensors.values() if t.numel()]
            assert len(set(pointers)) == len(pointers), "not taken for tied"

    def test_sizes_are_exact(self, tier, tmp_path):
        layer_groups = make_slices()
        with make_arena(tier, tmp_path, layer_groups, prefetch=1) as pool:
            sizes = [Layout.of(tensors).num_bytes for tensors in layer_groups.values()]
            assert pool.num_bytes[tier] == sum(sizes)
            assert pool.num_bytes["device"] == 2 * max(sizes)

    def test_prefetch_says_whether_there_was_room(self, tier, tmp_path):
        with make_arena(tier, tmp_path, make_slices(), prefetch=1) as pool:
            assert [pool.prefetch(key) for key in (0, 1, 1, 2)] == [True, True, True, False]
            pool.fetch(2)  # takes the place of one that was never used
            pool.fetch(1)

    def test_a_slice_that_is_wanted_again_is_not_read_again(self, tier, tmp_path):
        layer_groups = make_slices()
        with make_arena(tier, tmp_path, layer_groups) as pool:
            for changed in (False, True, False):
                with pool.using(4, changed=changed):
                    pass
            assert pool.traffic.read_bytes == pool.traffic.written_bytes == Layout.of(layer_groups[4]).num_bytes

    def test_reads_run_while_the_caller_computes(self, tier, tmp_path):
        with make_arena(tier, tmp_path, make_slices()) as pool:
            names = set()
            store = pool._transfers[tier].store
            read = store.read

            def spy(key, pieces):
                names.add(threading.current_thread().name)
                read(key, pieces)

            store.read = spy
            pool.prefetch(1)
            pool.fetch(1)
            assert names == {"tier-read_0"}

    def test_first_values_come_from_a_function_slice_by_slice(self, tier, tmp_path):
        layer_groups = {i: {f"w{i}": nn.Parameter(placeholder((50, 4), torch.float32, "cpu"))} for i in range(3)}
        calls = []

        def fill(tensors):
            calls.append(list(tensors))
            for name, tensor in tensors.items():
                assert tensor.device.type == "cpu"
                tensor.fill_(len(name) + len(calls))

        with OffloadPool(tier, "cpu", folder=tmp_path) as pool:
            for key, tensors in layer_groups.items():
                pool.add(key, tensors, fill=fill, resident=key == 1)
            pool.seal()
            assert calls == [["w0"], ["w1"], ["w2"]]
            assert (layer_groups[1]["w1"] == 4).all(), "live at once"
            assert [pool.read(i)[f"w{i}"].unique().tolist() for i in range(3)] == [[3.0], [4.0], [5.0]]


def test_slices_without_tensors_and_arenas_without_slices(tmp_path):
    with make_arena("disk", tmp_path, {}) as pool:
        assert pool.num_bytes == {"device": 0, "host": 0, "disk": 0}
    with make_arena("host", tmp_path, {"a": {}}) as pool, pool.using("a", changed=True) as tensors:
        assert tensors == {}


def test_wrong_arguments():
    with pytest.raises(ValueError, match="folder"):
        OffloadPool("disk", "cpu")
    with pytest.raises(ValueError, match="prefetch"):
        OffloadPool("host", "cpu", prefetch=-1)
    with pytest.raises(AssertionError, match="contiguous"):
        OffloadPool("host", "cpu").add(0, {"w": torch.ones(3, 4).T})


@contextmanager
def largest_file(num_bytes):
    """The system refuses to write beyond this place of any file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def file_of(pool):
    """The file of the disk tier."""
    return pool._transfers["disk"].store.fileno()


class TestDisk:
    """What can go wrong with the disk tier."""

    def big_slices(self):
        return {i: {"w": torch.full((MIB,), float(i))} for i in range(3)}  # 4 MiB each

    def test_full_at_the_start(self, tmp_path):
        layer_groups = self.big_slices()
        with largest_file(5 * MIB), pytest.raises(FitError) as caught:
            make_arena("disk", tmp_path, layer_groups)
        problem = caught.value.problems[0]
        assert problem.what == "Disk is full: no room for the offloaded tensors"
        assert "12.00 MiB" in problem.need
        assert "free" in problem.got
        assert "memory.offload_dir" in problem.try_
        assert all((tensors["w"] == i).all() for i, tensors in layer_groups.items()), "nothing has moved"
        assert list((tmp_path / "tier").iterdir()) == []

    def test_full_in_mid_run(self, tmp_path):
        with make_arena("disk", tmp_path, self.big_slices(), prefetch=0) as pool:
            with largest_file(5 * MIB):
                with pool.using(0, changed=True):
                    pass
                pool.flush()
                with pool.using(2, changed=True):
                    pass
                with pytest.raises(HardwareError, match="cannot be written"):
                    pool.flush()
            with pytest.raises(HardwareError, match="newest checkpoint"):
                pool.fetch(1)
            for key in (0, 1, 2):
                with pytest.raises(HardwareError, match="cannot be written"):
                    pool.read(key)
            with pytest.raises(HardwareError, match="cannot be written"):
                pool.flush()

    def test_its_folder_is_removed_in_mid_run(self, tmp_path):
        layer_groups = self.big_slices()
        with make_arena("disk", tmp_path, layer_groups, prefetch=0) as pool:
            shutil.rmtree(tmp_path / "tier")
            for key in layer_groups:
                with pool.using(key, changed=True) as tensors:
                    assert (tensors["w"] == key).all()
                    tensors["w"].add_(10)
            assert [int(pool.read(key)["w"][0]) for key in layer_groups] == [10, 11, 12]

    def test_file_is_cut_in_mid_run(self, tmp_path):
        with make_arena("disk", tmp_path, self.big_slices(), prefetch=0) as pool:
            os.ftruncate(file_of(pool), 6 * MIB)
            pool.fetch(0)
            pool.release(0, changed=False)
            for _ in range(2):
                with pytest.raises(HardwareError, match=f"the file ends at byte {6 * MIB} of {12 * MIB}"):
                    pool.fetch(1)
            with pytest.raises(HardwareError, match="the file ends"):
                pool.read(2)

    def test_folder_cannot_be_written(self, tmp_path):
        (tmp_path / "tier").write_text("a file")
        with pytest.raises(ConfigError, match=r"memory\.offload_dir"):
            make_arena("disk", tmp_path, self.big_slices())

    def test_kill_leaves_nothing(self, tmp_path):
        code = f"""
import os, signal, torch
from tilewright.memory.offload.pool import OffloadPool
arena = OffloadPool("disk", "cpu", folder={str(tmp_path)!r})
arena.add(0, {{"w": torch.ones({MIB})}})
arena.seal()
arena.fetch(0)
arena.release(0, changed=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == -9
        assert list(tmp_path.iterdir()) == []

    def test_close_gives_the_room_back(self, tmp_path):
        pool = make_arena("disk", tmp_path, self.big_slices())
        handle = os.open(f"/proc/self/fd/{file_of(pool)}", os.O_RDONLY)
        try:
            assert os.fstat(handle).st_blocks * 512 >= 12 * MIB, "taken at the start"
            assert os.fstat(handle).st_nlink == 0, "without a name"
        finally:
            os.close(handle)
        pool.close()
        pool.close()
