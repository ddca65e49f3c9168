"""One of several ranks killed (SIGKILL) at random moments while they save: what is found then is whole."""

import random

import pytest
import torch

from tests.training.ranks_that_die import on_ranks_of_which_one_dies
from tests.training.sharded import joined, sharded_state
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore

pytestmark = pytest.mark.dist
WORLD = 3


def _fill(state, step: int) -> None:
    """All of model and optimizer says of which step it is."""
    with torch.no_grad():
        for name, tensor in state.tensors().items():
            if not name.startswith("rng."):
                tensor.fill_(step)


def _saves_until_one_dies(rank, folder, first):
    world = joined(WORLD)
    state, _ = sharded_state(world, seed=0)
    state.optimizer.init_states()
    store = CheckpointStore(folder, world=world)
    for step in range(first, first + 10_000):
        _fill(state, step)
        try:
            state.save(store, step, state.meta() | {"step": step})
        except RuntimeError as error:  # ranks exchange names before they write
            if "gloo" in str(error):
                return [error]
            raise
        errors = [record.error for record in store.finished()]
        if any(errors):
            return errors
    raise AssertionError("nobody died")


def _kill(folder, kills: int) -> None:
    seed = random.getrandbits(32)
    print(f"{seed = }")
    draw = random.Random(seed)
    store = CheckpointStore(folder)
    step = 0
    for _ in range(kills):
        victim, after_s = draw.randrange(WORLD), draw.uniform(0, 0.1)
        begun = store.path_of(step + 1)
        on_ranks_of_which_one_dies(WORLD, victim, begun, after_s, _saves_until_one_dies, folder, step + 1)
        store.remove_unfinished()
        path, rejected = store.newest_sound()
        assert rejected == []
        assert {left.name for left in folder.iterdir()} == {left.name for left in store.paths()}
        state, _ = sharded_state(joined(1), seed=1)
        meta = state.restore(path)
        assert meta["step"] > step
        step = meta["step"]
        assert path == store.path_of(step)
        for name, tensor in state.tensors().items():
            if not name.startswith("rng."):
                assert (tensor == step).all(), f"{name} is of another step than {step}: {tensor}"


def test_killed_at_random_moments(tmp_path):
    _kill(tmp_path, 1)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path):
    _kill(tmp_path, 20)
