"""A rank of `tp` that is given other rows than the ranks with the other parts: all of them say so, and none steps."""

import pytest
import torch

from tests.parallel.inside.tensor.cut import Case, cut, world_of
from tests.parallel.steps import groups_of, microbatches
from tests.ranks import on_ranks
from tilewright.core.errors import ConfigError
from tilewright.ops.base.tensor_parts import local
from tilewright.optim.clip import GradClip
from tilewright.training.executor.standard import StandardExecutor

pytestmark = pytest.mark.dist


def _other_token(batches):
    batches[1]["input_ids"][0, 3] ^= 1


def _other_label(batches):
    batches[0]["labels"][1, 9] = -100


def _shorter(batches):
    batches[1] = {name: tensor[:, :-1] for name, tensor in batches[1].items()}


def _other_order(batches):
    batches.reverse()


def _one_less(batches):
    batches.pop()


SPOILT = (_other_token, _other_label, _shorter, _other_order, _one_less)


def _steps(rank):
    case = Case(2, number=2)
    world = world_of(case)
    model = cut(case, world)
    executor = StandardExecutor(
        model, torch.optim.SGD(model.parameters(), lr=0.1), clip=GradClip(0.0), world=world, **groups_of(world)
    )
    before, found = [local(param).clone() for param in model.parameters()], []
    for spoil in SPOILT:
        batches = microbatches(0, case.number)
        if rank == 1:
            spoil(batches)
        with pytest.raises(ConfigError) as error:
            executor.step(batches, 0.1)
        (problem,) = error.value.problems
        found.append((problem.what, problem.got, problem.need, problem.try_))
    assert all(torch.equal(local(param), old) for param, old in zip(model.parameters(), before, strict=True))
    return found, executor.step(microbatches(0, case.number), 0.1).loss


def test_other_rows_on_one_rank():
    (found, loss), (found_too, loss_too) = on_ranks(2, _steps)
    assert found == found_too, "both say the same"
    assert all(all(parts) for parts in found)
    *others, fewer = found
    for what, got, *_ in others:
        assert "do not read the same micro-batches" in what
        assert "rank 0 than on rank 1" in got
    assert "different numbers of micro-batches" in fewer[0]
    assert loss == loss_too, "and the next step is whole"
