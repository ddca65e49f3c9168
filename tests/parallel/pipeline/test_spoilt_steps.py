"""Steps of a pipeline that are spoilt in drawn ways, on drawn ranks: all ranks say the same error before anything is
sent, or have the NaN that it makes; none waits, and the next whole step has the bits of the first one."""

import pytest
import torch

from tests.draws import draw_from
from tests.parallel.pipeline.ragged import decoder, micro_batches
from tests.ranks import on_ranks
from tilewright.core import env
from tilewright.core.errors import ConfigError
from tilewright.parallel.fill_shards import shard_all
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.microbatch_plan import StepPlan
from tilewright.parallel.pipeline.rank_passes import PipelineSteps
from tilewright.parallel.pipeline.rank_stages import hold_stages
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.shard import Sharding
from tilewright.parallel.world import join

pytestmark = pytest.mark.dist
COUNT = 4


def _cut(batches, number):
    batches[number] = {name: tensor[:, :-1].contiguous() for name, tensor in batches[number].items()}


def _row_more(batches, number):
    batches[number] = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in batches[number].items()}


def _other_token(batches, number):
    ids = batches[number]["input_ids"]
    ids[0, 0] = (ids[0, 0] + 1) % 61


def _other_label(batches, number):
    batches[number]["labels"][0, -1] += 1


def _other_dtype(batches, number):
    batches[number]["segments"] = batches[number]["segments"].long()


def _no_documents(batches, number):
    del batches[number]["segments"]


def _swapped(batches, number):
    other = (number + 1) % COUNT
    batches[number], batches[other] = batches[other], batches[number]


def _one_less(batches, number):
    del batches[number]


def _one_twice(batches, number):
    batches.append(batches[number])


SPOILT = (_cut, _row_more, _other_token, _other_label, _other_dtype, _no_documents, _swapped, _one_less, _one_twice)


def _step(world, steps, params, batches):
    """The text of the error, or the gradients."""
    for param in params:
        param.grad = None
    try:
        StepPlan.of(batches).check(world)
        steps.run(batches, 1.0)
    except ConfigError as error:
        (problem,) = error.problems
        assert all((problem.what, problem.got, problem.need, problem.try_))
        return problem.what
    return [
        param.grad.to_local().clone() if hasattr(param.grad, "to_local") else param.grad.clone() for param in params
    ]


def _runs(rank, cases, shards):
    world = join(env.ranks(), MeshSizes(pp=2, dp_shard=shards), torch.device("cpu"))
    pipeline = Pipeline(2, "zbv", 2)
    held = hold_stages(decoder("tied", 5), pipeline, world.row)
    if world.fsdp_mesh is not None:
        shard_all(held, (), world.fsdp_mesh, Sharding(), held.stages)
    steps, params = PipelineSteps(held, torch.device("cpu")), list(held.parameters())

    def batches(seed):
        return micro_batches(COUNT, torch.Generator().manual_seed(seed + world.data.rank))

    first, found = _step(world, steps, params, batches(0)), []
    for spoil, on, number, seed in cases:
        given = batches(seed)
        if rank == on:
            SPOILT[spoil](given, number)
        found.append(_step(world, steps, params, given))
    nothing = batches(0)
    for batch in nothing:
        batch["labels"].fill_(-100)
    empty = _step(world, steps, params, nothing)
    again = _step(world, steps, params, batches(0))
    same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return found, all(not grad.any() for grad in empty), same


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_say_the_same_and_go_on(ranks):
    draw_from(f"spoilt steps of {ranks}")

    def drawn(below):
        return int(torch.randint(below, (1,)))

    cases = [(spoil, drawn(ranks), drawn(COUNT), 1 + drawn(100)) for spoil in range(len(SPOILT)) for _ in range(2)]
    results = on_ranks(ranks, _runs, cases, ranks // 2, seconds=200)
    for number, case in enumerate(cases):
        said = [found[number] for found, _, _ in results]
        what = f"{SPOILT[case[0]].__name__} on rank {case[1]}, micro-batch {case[2]}: {said}"
        assert all(isinstance(one, str) for one in said), what
        assert len(set(said)) == 1, what
        assert "different numbers" in said[0] or "do not read the same" in said[0], what
    assert all(empty for _, empty, _ in results), "a step without targets has gradients of zeros"
    assert all(same for _, _, same in results), "bitwise, after all of it"
