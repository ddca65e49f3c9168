"""Layers of a cut decoder that are compiled between their exchanges: gradients of one process, few graphs."""

import copy

import pytest
import torch

from tests.parallel.inside.tensor import cut as own
from tests.parallel.inside.tensor.cut import Case, compare, cut, world_of
from tests.parallel.inside.tensor.test_formats import TILES
from tests.parallel.inside.tensor.test_parity import FULL, check
from tests.parallel.steps import microbatches, run
from tests.ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]
MODES = {"bf16_mixed": 2**-8 * (2 * 14) ** 0.5, "fp8_tile": 10 ** (-22 / 20)}
"""By format, how far a gradient of compiled layers may be from that of layers as they are, by its norm: roundings of 14
matrices there and back, which add up as draws do; in 8 bits 22 dB, as ranks beside one process."""


@pytest.mark.support("compiled", "tensor")
def test_gradients_are_those_of_one_process():
    cases = [Case(2, compiled=True), Case(2, compiled=True, slices=False, settings=FULL)]
    cases += [Case(2, compiled=True, kind=kind) for kind in ("moe", "mla_q")]
    cases += [Case(2, compiled=True, chunks=2, settings=settings) for settings in ({}, FULL)]
    check(cases, on_ranks(2, compare, cases, seconds=280))


def _beside_eager(rank):
    """Gradients of both, and how many graphs there are."""
    from torch._dynamo.utils import counters

    own.CONFIGS["tiles"] = TILES
    found = {}
    for mode in MODES:
        counters.clear()
        grads = []
        for compiled in (False, True):
            case = Case(2, kind="tiles", mode=mode, compiled=compiled)
            world = world_of(case)
            grads.append(run(cut(case, world), world, microbatches(0, 2))[0].grads)
        eager, ours = grads
        worst = max(float((ours[name] - want).norm() / want.norm()) for name, want in eager.items())
        found[mode] = worst, counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return found


def test_narrow_formats_beside_layers_as_they_are():
    """Attention, MLP and two norms have a graph each, whatever layer they are in; none breaks. What reads codes that
    travel is not compiled."""
    for of_rank in on_ranks(2, _beside_eager, seconds=280):
        for mode, bound in MODES.items():
            worst, graphs, breaks = of_rank[mode]
            print(mode, worst, graphs, breaks)
            assert worst <= bound, mode
            assert not breaks
            assert graphs <= 4


def _of_a_copy(rank):
    """Losses of a copy with other weights, compiled and not, and of the model that it was made from, twice."""
    (batch,) = microbatches(0, 1)
    found = []
    for compiled in (False, True):
        case = Case(2, compiled=compiled)
        model = cut(case, world_of(case))
        before = float(model.loss(batch).loss_sum)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(0.5)
        found.append((float(other.loss(batch).loss_sum), before, float(model.loss(batch).loss_sum)))
    return found


def test_a_copy_computes_with_its_own_weights():
    for (theirs, first, _), (ours, before, after) in on_ranks(2, _of_a_copy, seconds=280):
        assert abs(theirs - first) > 1e-3 * first, "the weights that differ change the loss"
        assert abs(ours - theirs) <= 2e-6 * theirs
        assert before == after
