"""What a rank holds of a mixture whose experts are spread: first weights, routers, matrices, errors."""

import dataclasses

import pytest
import torch
from torch import nn

from tests.models.shapes import KERNELS, SHAPES
from tests.parallel.inside.experts.spread import Case, spread, whole, world_of
from tests.parallel.steps import is_part
from tests.ranks import on_ranks
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.models.base.hidden_matrices import hidden_matrices
from tilewright.models.base.routers import find_routers, num_experts
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.base.tensor_parts import part_of, sharded_like
from tilewright.optim.gradients import gradient_values, total_norm
from tilewright.parallel.inside.experts.rank_experts import hold_experts
from tilewright.parallel.launch import EXPERTS
from tilewright.precision.convert import evaluating, set_mode


def _names(model, found):
    known = {id(part): name for name, part in [*model.named_modules(), *model.named_parameters()]}
    return {known[id(each)] for each in found}


def _held(rank, sizes):
    world = world_of(Case(*sizes))
    found = []
    for kind, mode in (("gqa_moe", "fp32"), ("deepseek", "fp8_tile"), ("deepseek", "pure_fp16")):
        case = Case(*sizes, kind=kind, mode=mode)
        model, reference = spread(case, world), whole(case)
        want = dict(reference.named_parameters())
        for name, param in model.named_parameters():
            full = param.full_tensor() if is_part(param) else param
            assert torch.equal(full, want[name]), f"{name} has other first weights"
        held = {name for name, _ in model.named_parameters()}
        assert _names(model, find_routers(model)) == _names(reference, find_routers(reference))
        assert _names(model, hidden_matrices(model)) == _names(reference, hidden_matrices(reference)) & held
        found.append(sorted(held))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [pytest.param((2, 2), marks=pytest.mark.slow), (2, 4)])
def test_a_rank_has_its_experts_as_one_process_has_them(sizes):
    of_ranks = on_ranks(sizes[1], _held, sizes)
    for names in zip(*of_ranks, strict=True):
        experts = [{name for name in held if ".experts." in name} for held in names]
        assert experts[0] | experts[1], "there are some"
        assert not experts[0] & experts[1]
        assert (
            len({frozenset(held) - frozenset(own) for held, own in zip(map(frozenset, names), experts, strict=True)})
            == 1
        )


def _norms(rank):
    case = Case(2)
    world = world_of(case)
    model = spread(case, world)
    generator = torch.Generator().manual_seed(0)
    want = 0.0
    held = dict(model.named_parameters())
    for name, param in whole(case).named_parameters():  # in the order of one process, on each rank
        grad = torch.randn(param.shape, generator=generator)
        want += float(grad.double().square().sum())
        if name in held:
            part = held[name]
            rows = grad[part_of(part).slices]
            part.grad = sharded_like(rows, part.shape, part)
    lists = gradient_values(model.parameters())
    got = [total_norm(lists, experts=world.experts.handle)]
    if rank == 1:  # of an expert that the other rank has not
        next(param for name, param in held.items() if ".experts." in name).grad.to_local()[0, 0] = float("nan")
    got.append(total_norm(gradient_values(model.parameters()), experts=world.experts.handle))
    return got, want**0.5


@pytest.mark.dist
def test_the_norm_counts_each_expert_once():
    for (norm, bad), want in on_ranks(2, _norms):
        assert norm == pytest.approx(want, rel=1e-6)
        assert bad != bad, "on both ranks"


def _switched(rank):
    """FP32 evaluation, and a switch of formats, between the ranks' passes."""
    case = Case(2, mode="fp8_tile")
    model, reference = spread(case, world_of(case)), whole(case)
    ids = torch.arange(24).view(2, 12) % 50 + rank
    outs = []
    with torch.no_grad():
        for mode in ("fp8_tile", "bf16_mixed", "fp32"):
            for each in (model, reference):
                set_mode(each, mode)
            outs.append(torch.equal(model.logits_at(ids, ids > 0), reference.logits_at(ids, ids > 0)))
            with evaluating(model), evaluating(reference):
                outs.append(torch.equal(model.logits_at(ids, ids > 0), reference.logits_at(ids, ids > 0)))
    return outs


@pytest.mark.dist
@pytest.mark.support("fp8", "experts_spread")
def test_formats_move_and_evaluation_is_in_fp32():
    assert on_ranks(2, _switched) == [[True] * 6] * 2


def test_a_collection_says_how_many_there_are_in_all():
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert num_experts(experts) == 3
    experts.num_in_whole = 12
    assert num_experts(experts) == 12


def _refused(rank):
    world, told = world_of(Case(2)), []
    dense, odd = SHAPES["gqa"], dataclasses.replace(SHAPES["gqa_moe"], num_experts=5)
    for model in (nn.Linear(2, 2), Decoder(dense, KERNELS), Decoder(odd, KERNELS)):
        with pytest.raises(ConfigError) as caught:
            hold_experts(model, world)
        told.append(str(caught.value))
    return told


@pytest.mark.dist
def test_what_cannot_be_spread():
    for told in on_ranks(2, _refused):
        for text, words in zip(told, ("Linear", "num_experts = 0", "divides 5: 1, 5"), strict=True):
            assert words in text
            assert "--parallel.ep 1" in text


def test_an_older_torch_is_named():
    with pytest.raises(HardwareError, match=r"torch 2\.11") as caught:
        EXPERTS.check("2.11.0+cpu")
    assert "--parallel.ep 1" in str(caught.value)
    EXPERTS.check("2.13.1")
