"""Gradients of experts that are spread over ranks are those of one process, whatever the mesh and the training."""

import pytest
import torch

from tests.parallel.inside.experts.spread import Case, compare
from tests.parallel.inside.parity import LIKE_ONE_PROCESS, check_errors
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist
KINDS = ("gqa_moe", "deepseek")
FULL = {"activation_checkpoint": "full"}


def check(cases, of_ranks, bound=LIKE_ONE_PROCESS):
    """All names are somewhere, and each gradient, the loss, the norm and the biases are those of one process."""
    for number, case in enumerate(cases):
        results = [found[number] for found in of_ranks]
        assert {name for found in results for name in found["errors"]} == set(results[0]["whole"]), case
        held = [{name for name in found["errors"] if ".experts." in name} for found in results]
        assert all(len(names) * case.ep == len(set.union(*held)) for names in held), "each has its share alone"
        for rank, found in enumerate(results):
            check_errors(case, rank, found, bound)
            assert found["biases"], "load is counted once over all ranks"
            assert found["dtypes"] == {torch.float32}


@pytest.mark.support("decoder", "experts_spread")
@pytest.mark.support("experts", "experts_spread")
@pytest.mark.support("checkpointing", "experts_spread")
@pytest.mark.support("accumulation", "experts_spread")
@pytest.mark.slow
def test_on_two_ranks():
    cases = [Case(2, kind=kind) for kind in KINDS]
    cases += [Case(2, settings={"activation_checkpoint": "selective"})]
    cases += [Case(2, batches="last"), Case(2, options={"reduce_each": True}, number=3)]
    check(cases, on_ranks(2, compare, cases))


def test_on_four_ranks():
    cases = [Case(2, 4, kind="deepseek", settings=FULL), Case(2, 2, 2)]
    check(cases, on_ranks(4, compare, cases))


@pytest.mark.slow
def test_more_meshes_and_what_layers_keep():
    cases = [Case(2, settings={"activation_checkpoint": mode}) for mode in ("matmuls", "attention", "full")]
    check(cases, on_ranks(2, compare, cases))
    cases = [Case(4), Case(2, 4), Case(4, batches="last")]
    check(cases, on_ranks(4, compare, cases))
