"""The precision controller where experts are spread: ranks measure other experts, and decide alike, on the worst of
all; they find what one process finds of a feature that is far too large."""

import pytest

from tests.parallel.inside.experts.spread import Case, spread, whole, world_of
from tests.parallel.inside.tensor.test_controller import POLICY, decide, spoiled
from tests.ranks import of_one_rank, on_ranks
from tilewright.parallel.world import World
from tilewright.precision.controller.precision_controller import sites_of

pytestmark = pytest.mark.dist
CASE, NORM, EXPERTS = Case(2, mode=POLICY), "layers.1.post_attention_layernorm", "layers.1.mlp.experts."


def _alone():
    return decide(whole(CASE), World.alone(), spoiled=NORM)


def _decided(rank):
    """Both read the same rows: an expert's are those of one process, twice."""
    world = world_of(CASE)
    return decide(spread(CASE, world), world, sites_of(whole(CASE)), NORM), of_one_rank(_alone)


@pytest.mark.support("controller", "experts_spread")
def test_ranks_decide_alike_and_as_one_process_does():
    (first, alone), (second, _) = on_ranks(2, _decided)
    assert first == second
    told, formats, losses = first
    print(told, losses, alone[2])
    assert {layer for layer, _ in formats} == {layer for layer, _ in alone[1]}, "of all experts"
    moved = spoiled(told, EXPERTS)
    assert moved == spoiled(alone[0], EXPERTS)
    experts = {name.split(".")[5] for name, _ in moved}
    assert experts & set("0123"), "of one rank"
    assert experts & set("4567"), "of the other"
    assert losses == pytest.approx(alone[2], rel=2e-3)
