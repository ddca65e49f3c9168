"""Layer-major steps on copies of the model: a layer group's gradient is summed before its update."""

import pytest
import torch

from tests.models.shapes import make_batch, make_decoder
from tests.parallel.steps import groups_of, relative, world_of
from tests.ranks import on_ranks
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.models.layerwise.layer_view import find_layer_groups
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.parallel.world import World
from tilewright.training.executor.layer_major import LayerMajorExecutor

LR = 1e-3
STEPS = 3


def _executor(kind, world, *, delayed):
    model = make_decoder(kind)
    optimizer = DeepSeekAdam(model.parameters(), lr=LR)
    groups = find_layer_groups(model, model, 1)
    buffer = RollbackBuffer("host", "cpu") if delayed else None
    options = {"clip": GradClip(0.5), "delayed": delayed, "rollback_buffer": buffer, **groups_of(world)}
    return LayerMajorExecutor(model, model, groups, optimizer, **options)


def _batches(step, rank, spoiled=()):
    """Micro-batches of a rank, one rank with more of them."""
    batches = [make_batch(seed=100 * step + 10 * rank + index) for index in range(1 + rank)]
    if (step, rank) in spoiled:
        batches[0]["labels"][:] = -100
    return batches


def _train(kind, world, shares, *, delayed):
    executor = _executor(kind, world, delayed=delayed)
    results = []
    for step in range(STEPS):
        result = executor.step([batch for rank in shares for batch in _batches(step, rank, {(2, 0)})], LR)
        results.append((result.loss, result.grad_norm, result.num_targets, result.num_tokens, result.skipped))
    return {name: tensor.detach() for name, tensor in executor.model.state_dict().items()}, results


def _compare(rank, delayed):
    world = world_of((2, 1))
    found = []
    for kind in ("deepseek",) if delayed else ("gqa", "deepseek"):
        weights, results = _train(kind, world, [rank], delayed=delayed)
        want, alone = _train(kind, World.alone(), [0, 1], delayed=delayed)
        # Adam's first steps are of the sign of a gradient: elements whose gradient is all rounding may go either way.
        error = {name: float((weights[name] - tensor).abs().max()) for name, tensor in want.items()}
        start = make_decoder(kind).state_dict()
        moved = max(relative(tensor, start[name]) for name, tensor in want.items())
        found.append((max(error.values()), moved, results, alone, {k: v.numpy() for k, v in weights.items()}))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.support("layer_major", "copies")
def test_two_copies_train_as_one_process_does(delayed):
    first, second = on_ranks(2, _compare, delayed)
    for ours, theirs in zip(first, second, strict=True):
        error, moved, results, alone, weights = ours
        assert moved > 1e-3
        assert error <= 2 * LR * 0.05, f"off by {error}"
        for (loss, norm, *counts), (want_loss, want_norm, *want_counts) in zip(results, alone, strict=True):
            assert counts == want_counts
            assert loss == pytest.approx(want_loss, rel=1e-5)
            assert norm == pytest.approx(want_norm, rel=1e-5)
        for name, weight in weights.items():
            assert torch.equal(torch.from_numpy(weight), torch.from_numpy(theirs[4][name])), f"{name} differs by rank"


def _bad(rank, delayed):
    executor = _executor("gqa", world_of((2, 1)), delayed=delayed)
    before = {name: tensor.clone() for name, tensor in executor.model.state_dict().items()}
    if rank == 1:  # of this rank alone: the loss of its rows is not finite
        real = executor.run.view.epilogue

        def broken(*args):
            out = real(*args)
            return type(out)(out.loss_sum * float("inf"), out.count, out.aux)

        executor.run.view.epilogue = broken
    result = executor.step(_batches(0, rank), LR)
    same = all(torch.equal(tensor, before[name]) for name, tensor in executor.model.state_dict().items())
    return result.skipped, same


@pytest.mark.dist
@pytest.mark.parametrize("delayed", [False, True])
def test_a_loss_that_is_bad_on_one_rank_skips_the_step_on_all(delayed):
    for skipped, same in on_ranks(2, _bad, delayed):
        assert "not finite" in skipped
        assert same
