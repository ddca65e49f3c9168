"""A training state goes through a checkpoint and comes back bitwise, in place, into the right model only."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.models.shapes import KERNELS
from tilewright.core.errors import CheckpointError
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.training.checkpoint.checkpoint_state import TrainState, model_fingerprint
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore


class Tied(nn.Module):
    """Embedding and head share a matrix, and a batch norm brings buffers."""

    def __init__(self, dim: int = 8, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, dim)
        self.norm = nn.BatchNorm1d(dim)
        self.mid = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, ids):
        return self.head(nn.functional.dropout(self.mid(self.norm(self.embed(ids))), 0.3))


def _adam(model, **options):
    return DeepSeekAdam(model.parameters(), lr=0.01, kernels=KERNELS, **options)


def _train(model, optimizer, clip, steps):
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 11, (16,))
        labels = torch.tensor(np.random.randint(0, 11, 16) + random.randint(0, 0))
        loss = nn.functional.cross_entropy(model(ids).float(), labels)
        loss.backward()
        clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (_adam, torch.float32),
        (lambda m: _adam(m, moments="bf16"), torch.float32),
        (_adam, torch.bfloat16),
        (lambda m: _adam(m, moments="bf16", master="stochastic"), torch.bfloat16),
        (lambda m: _adam(m, moments="8bit"), torch.float32),
        (lambda m: _adam(m, moments="8bit", master="split24"), torch.bfloat16),
        (lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), torch.float32),
    ],
    ids=["fp32", "bf16_moments", "bf16_weights", "stochastic", "8bit", "split24", "torch_adamw"],
)
def test_resumed_equals_never_stopped_bitwise(tmp_path, make, dtype):
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    model = Tied().to(dtype)
    optimizer, clip = make(model), GradClip(1.0, adaptive=1.1)
    state = TrainState(model, optimizer, {"clip": clip})
    _train(model, optimizer, clip, 4)
    store = CheckpointStore(tmp_path)
    store.save(4, state.tensors(), state.meta())
    expected = _train(model, optimizer, clip, 4)
    store.wait()

    fresh = Tied(seed=99).to(dtype)
    storages = {name: p.data_ptr() for name, p in fresh.named_parameters()}
    other, other_clip = make(fresh), GradClip(1.0, adaptive=1.1)
    TrainState(fresh, other, {"clip": other_clip}).restore(store.path_of(4))
    assert storages == {name: p.data_ptr() for name, p in fresh.named_parameters()}, "parameters were replaced"
    assert fresh.head.weight is fresh.embed.weight
    assert _train(fresh, other, other_clip, 4) == expected
    for (name, a), b in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_tied_weights_are_stored_once_and_caches_not_at_all():
    model = Tied()
    names = TrainState(model, _adam(model), {}).tensors().keys()
    assert "model.embed.weight" in names
    assert "model.head.weight" not in names
    assert "model.cache" not in names
    assert "model.norm.num_batches_tracked" in names


def test_restoring_holds_one_tensor_beside_the_model(tmp_path):
    """A state of 96 MiB in 12 tensors: the peak of loading stays far below a second copy."""
    model = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(4)))
    optimizer = _adam(model)
    optimizer.init_states()
    state = TrainState(model, optimizer, {})
    store = CheckpointStore(tmp_path)
    store.save(1, state.tensors(), state.meta(), now=True)
    state.restore(store.path_of(1))  # code and caches
    memory_tracker = MemoryTracker("cpu")
    with memory_tracker.phase("restore"):
        before = memory_tracker.baseline_bytes
        state.restore(store.path_of(1))
    assert memory_tracker.snapshot(None, None)["phases"]["restore"] - before < 40 * 2**20
    memory_tracker.close()


def test_states_made_beforehand_keep_their_dtype(tmp_path):
    model = Tied()
    optimizer = _adam(model)
    _train(model, optimizer, GradClip(1.0), 2)
    store = CheckpointStore(tmp_path)
    state = TrainState(model, optimizer, {})
    store.save(2, state.tensors(), state.meta())
    store.wait()
    fresh = copy.deepcopy(model)
    narrow = _adam(fresh, moments="bf16")
    narrow.init_states()
    TrainState(fresh, narrow, {}).restore(store.path_of(2))
    moment = narrow.state[fresh.mid.weight]["exp_avg"]
    assert moment.dtype == torch.bfloat16
    assert torch.equal(moment, optimizer.state[model.mid.weight]["exp_avg"].to(torch.bfloat16))
    assert int(narrow.state[fresh.mid.weight]["step"]) == 2


def test_checkpoint_of_another_model_lists_the_first_differences_and_changes_nothing(tmp_path):
    model = Tied()
    state = TrainState(model, _adam(model), {})
    store = CheckpointStore(tmp_path)
    store.save(1, state.tensors(), state.meta())
    store.wait()
    wide = Tied(dim=16)
    before = copy.deepcopy(wide.state_dict())
    with pytest.raises(CheckpointError, match="checkpoint of another model") as caught:
        TrainState(wide, _adam(wide), {}).restore(store.path_of(1))
    problem = caught.value.problems[0]
    assert "embed.weight: 11x8 in the checkpoint, 11x16 in this run" in problem.got
    assert "and 2 more" in problem.got
    assert "run.toml" in problem.try_
    for name, tensor in wide.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_checkpoint_of_another_optimizer_is_refused(tmp_path):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _train(model, optimizer, GradClip(1.0), 1)
    state = TrainState(model, optimizer, {})
    store = CheckpointStore(tmp_path)
    store.save(1, state.tensors(), state.meta())
    store.wait()
    adam = _adam(model)
    adam.init_states()
    with pytest.raises(CheckpointError, match="another optimizer"):
        TrainState(model, adam, {}).restore(store.path_of(1))


def test_8_bit_moments_with_scales_of_other_blocks_are_refused(tmp_path):
    """Scales of the flat tensor: as many blocks, in another shape or cut otherwise."""
    model = nn.Sequential(nn.Linear(256, 7, bias=False), nn.Linear(7, 50, bias=False))
    optimizer = _adam(model, moments="8bit")
    optimizer.init_states()
    state = TrainState(model, optimizer, {})
    flat = {name: t.reshape(-1) for name, t in state.tensors().items() if name.endswith("_scale")}
    store = CheckpointStore(tmp_path)
    store.save(1, state.tensors() | flat, state.meta(), now=True)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="another optimizer") as caught:
        state.restore(store.path_of(1))
    assert "0.weight.exp_avg_scale: 14 in the checkpoint, 7x2 in this run" in caught.value.problems[0].got
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_fingerprint_follows_names_and_shapes_not_values():
    assert model_fingerprint(Tied(seed=0)) == model_fingerprint(Tied(seed=1))
    assert model_fingerprint(Tied()) != model_fingerprint(Tied(dim=9))
