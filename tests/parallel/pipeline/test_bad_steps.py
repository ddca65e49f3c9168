"""What goes wrong with a step is said on all ranks, before anything is sent, and the next step is whole again."""

import pytest
import torch

from tests.parallel.pipeline.ragged import decoder, micro_batches
from tests.ranks import on_ranks
from tilewright.core import env
from tilewright.core.errors import ConfigError
from tilewright.models.distill.loss import MADE
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.microbatch_plan import StepPlan
from tilewright.parallel.pipeline.rank_passes import PipelineSteps
from tilewright.parallel.pipeline.rank_stages import hold_stages
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import join

pytestmark = pytest.mark.dist


def _said(work):
    try:
        work()
    except (ConfigError, ValueError) as error:
        return str(error)
    return ""


def _steps(rank):
    world, found = join(env.ranks(), MeshSizes(pp=2), torch.device("cpu")), {}

    def planned(change):
        batches = micro_batches(4, torch.Generator().manual_seed(1))
        if rank == 1:
            change(batches)
        return _said(lambda: StepPlan.of(batches).check(world))

    def shorter(batches):
        batches[2] = {name: tensor[:, :-1] for name, tensor in batches[2].items()}

    found["same"] = planned(lambda batches: None)
    found["shape"] = planned(shorter)
    found["label"] = planned(lambda batches: batches[3]["labels"].add_(1))
    found["count"] = planned(lambda batches: batches.pop())
    held = hold_stages(decoder("gqa", 2), Pipeline(2), world.row)
    steps, batches = PipelineSteps(held, torch.device("cpu")), micro_batches(4, torch.Generator().manual_seed(1))
    found["few"] = _said(lambda: steps.run(batches[:1], 1.0))
    found["none"] = _said(lambda: steps.run([], 1.0))
    for param in held.parameters():
        param.grad = None
    steps.run(batches, 1.0)
    first = [param.grad.clone() for param in held.parameters()]
    poison = [dict(batch) for batch in batches]
    if rank == 1:
        held.lm_head.weight.data[0] += float("nan")
    steps.run(poison, 1.0)
    found["nan"] = all(bool(param.grad.isnan().any()) for param in held.parameters())
    if rank == 1:
        held.lm_head.weight.data[0] = decoder("gqa", 2).lm_head.weight[0]
    for param in held.parameters():
        param.grad = None
    steps.run(batches, 1.0)
    found["again"] = all(torch.equal(a, b.grad) for a, b in zip(first, held.parameters(), strict=True))
    return found


def test_bad_steps():
    ranks = on_ranks(2, _steps)
    for found in ranks:
        assert found["same"] == ""
        assert "do not read the same micro-batches" in found["shape"]
        assert "do not read the same micro-batches" in found["label"]
        assert "3 on one rank, 4 on another" in found["count"]
        assert 'schedule "1f1b" does not take' in found["few"]
        assert "does not take" in found["none"]
        assert found["nan"], "a NaN of the last stage reaches the first one, in its gradients"
        assert found["again"], "bitwise, after all of it"
    assert {key: text for key, text in ranks[0].items()} == {key: text for key, text in ranks[1].items()}


def test_what_a_teacher_adds_is_no_part_of_the_plan():
    """The rank with the loss alone has it."""
    (batch,) = micro_batches(1, torch.Generator().manual_seed(1))
    made = {name: torch.rand(2) for name in MADE}
    assert StepPlan.of([batch | made]) == StepPlan.of([batch])


def test_what_cannot_be_cut():
    from tilewright.parallel.world import Group

    with pytest.raises(ConfigError, match="Fewer layers"):
        hold_stages(decoder("gqa", 2), Pipeline(3), Group(0, 3))
    with pytest.raises(ConfigError, match="no stages"):
        hold_stages(torch.nn.Linear(2, 2), Pipeline(2), Group(0, 2))
