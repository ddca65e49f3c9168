"""Gradients of experts that are spread over ranks are those of one process, whatever the mesh and the training."""

import pytest
import torch

from tests.models.shapes import SHAPES
from tests.parallel.inside.experts.spread import Case, compare
from tests.parallel.inside.parity import LIKE_ONE_PROCESS, check_errors
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist
KINDS = ("gqa_moe", "deepseek")
FULL = {"activation_checkpoint": "full"}
REDUNDANT = [
    Case(4, order=(0, 1, 5, 0, 2, 5, 0, 3, 4, 1, 6, 7), redundant=1),
    Case(2, 2, 2, order=(0, 1, 2, 3, 7, 0, 4, 5, 6, 7), redundant=1, options={"reduce_each": True}, number=3),
    Case(4, kind="deepseek", redundant=6, settings=FULL),
    Case(2, 4, redundant=2, batches="last"),
    Case(2, 4, redundant=1, lora="keep"),
]
"""One expert on three ranks; copies of shards; all experts on all ranks; experts without rows; adapters."""


def check(cases, of_ranks, bound=LIKE_ONE_PROCESS):
    """All names are somewhere, and each gradient, the loss, the norm and the biases are those of one process."""
    for number, case in enumerate(cases):
        results = [found[number] for found in of_ranks]
        assert {name for found in results for name in found["errors"]} == set(results[0]["whole"]), case
        held = [{name for name in found["errors"] if ".experts." in name} for found in results]
        number = SHAPES[case.kind].num_experts
        share = number // case.ep + case.redundant
        assert all(len(names) * number == len(set.union(*held)) * share for names in held), "each has its share alone"
        for name in set.union(*held):
            bits = {found["bits"][name] for found in results if name in found["bits"]}
            assert len(bits) == 1, f"{name}: copies differ"
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
    cases = [Case(2, 4, kind="deepseek", settings=FULL), Case(2, 2, 2), Case(2, 4, redundant=1)]
    check(cases, on_ranks(4, compare, cases))


@pytest.mark.slow
def test_more_meshes_and_what_layers_keep():
    cases = [Case(2, settings={"activation_checkpoint": mode}) for mode in ("matmuls", "attention", "full")]
    check(cases, on_ranks(2, compare, cases))
    cases = [Case(4), Case(2, 4), Case(4, batches="last"), *REDUNDANT]
    check(cases, on_ranks(4, compare, cases))
