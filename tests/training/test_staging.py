"""Host copies of a state: values of the moment, room that follows the state, one registered buffer beside a GPU."""

import gc
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import HardwareError
from tilewright.memory.offload import pinned_memory
from tilewright.training.checkpoint import write_checkpoint
from tilewright.training.checkpoint.write_checkpoint import Staging

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
TENSORS = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)),
    max_size=4,
)


def made(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 100, shape, generator=generator).to(dtype) for name, (shape, dtype) in shapes.items()
    }


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda")


@contextmanager
def gpu(refuses=False):
    """The driver's registrations, as a stand-in keeps them."""
    registered = {}

    class Runtime:
        def cudaHostRegister(self, start, size, flags):
            if refuses or any(begin < start + size and start < begin + length for begin, length in registered.items()):
                return 712
            registered[start] = size
            return 0

        def cudaHostUnregister(self, start):
            del registered[start]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", Runtime)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(pinned_memory, "_forget_error", lambda device: None)
        patch.setattr(write_checkpoint, "local", lambda tensor: tensor.as_subclass(OnGpu))
        yield registered


@given(states=st.lists(TENSORS, min_size=1, max_size=4))
@pytest.mark.parametrize("on_gpu", [False, True])
def test_each_copy_is_the_state_of_its_moment(on_gpu, states):
    """However names, shapes and dtypes change between saves; what is registered is given back with its room."""
    room = Staging()
    with gpu() if on_gpu else pytest.MonkeyPatch.context() as registered:
        for number, shapes in enumerate(states):
            given = made(shapes, number)
            found = room.copy(given)
            assert list(found) == list(given)
            for name, tensor in given.items():
                assert found[name].dtype == tensor.dtype
                assert torch.equal(found[name].as_subclass(torch.Tensor), tensor), name
                assert found[name].is_contiguous()
            assert room.num_bytes == sum(tensor.nbytes for tensor in given.values())
            kept = {name: part.data_ptr() for name, part in found.items()}
            assert {name: part.data_ptr() for name, part in room.copy(given).items()} == kept
            if on_gpu:
                assert len(registered) <= 1
                assert sum(registered.values()) <= room.num_bytes + 64 * len(given)
        del room, found
        gc.collect()
        assert not on_gpu or not registered


def test_a_driver_that_refuses_makes_a_save_slow_and_says_so(caplog):
    with gpu(refuses=True), caplog.at_level("WARNING", "tilewright"):
        found = Staging().copy({"a": torch.ones(3)})
    assert found["a"].tolist() == [1, 1, 1]
    assert "take longer" in caplog.text


def test_a_failed_registration_leaves_no_error_behind(monkeypatch):
    """The runtime keeps its last error until somebody asks; the next kernel's check would."""
    pending = []

    class Runtime:
        def cudaHostRegister(self, *args):
            pending.append("host memory is already registered")
            return 712

    def zeros(*args, **named):
        if pending:
            raise RuntimeError(pending.pop())
        return torch.ones(1)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(HardwareError, match="error 712"):
        pinned_memory.pinned_empty(10, torch.device("cuda"))
    assert not pending
