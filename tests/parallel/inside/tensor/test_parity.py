"""Gradients of a decoder whose matrices are cut over ranks are those of one process."""

import pytest

from tests.parallel.inside.parity import LIKE_ONE_PROCESS, check_errors
from tests.parallel.inside.tensor.cut import Case, compare
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist
FULL = {"activation_checkpoint": "full"}


def check(cases, of_ranks, bound=LIKE_ONE_PROCESS):
    """Each gradient, the loss and the norm are those of one process, the last two the same bits on all ranks."""
    for number, case in enumerate(cases):
        results = [found[number] for found in of_ranks]
        assert len({found["exact"] for found in results}) == 1, f"{case}: {[found['exact'] for found in results]}"
        for rank, found in enumerate(results):
            check_errors(case, rank, found, bound)


@pytest.mark.support("decoder", "tensor")
@pytest.mark.support("accumulation", "tensor")
@pytest.mark.support("teacher", "tensor")
@pytest.mark.slow
def test_on_two_ranks():
    cases = [Case(2), Case(2, kind="mla_q", settings=FULL), Case(2, kind="odd_vocabulary", chunks=2, number=3)]
    cases += [Case(2, taught=True, number=1), Case(2, kind="untied", taught=True, number=1, slices=False)]
    check(cases, on_ranks(2, compare, cases))


@pytest.mark.slow
@pytest.mark.support("checkpointing", "tensor")
@pytest.mark.support("tiled", "tensor")
def test_more_on_two_ranks():
    cases = [Case(2, kind=kind) for kind in ("untied", "mla", "mla_q")]
    cases += [Case(2, settings={"activation_checkpoint": mode}) for mode in ("selective", "matmuls", "attention")]
    cases += [Case(2, chunks=2, settings=FULL)]
    check(cases, on_ranks(2, compare, cases))


def test_on_four_ranks():
    """Four parts of a matrix are in `test_rows`."""
    cases = [Case(2, 2, kind="mla_q", settings=FULL, chunks=2)]
    check(cases, on_ranks(4, compare, cases))


@pytest.mark.slow
def test_more_on_four_ranks():
    cases = [Case(4, kind=kind, settings=FULL) for kind in ("gqa", "mla")]
    cases += [Case(2, 2, reshard=False), Case(2, 2, kind="mla")]
    cases += [Case(2, 2, kind="mla_q", settings=FULL), Case(2, 2, chunks=2), Case(2, copies=2)]
    cases += [Case(2, 2, kind="odd_vocabulary", options={"reduce_each": True}, number=3)]
    check(cases, on_ranks(4, compare, cases))


@pytest.mark.slow
def test_copies():
    """Of what is cut, and of experts in parts over the same ranks."""
    cases = [Case(2, copies=2, ep=2, kind="moe", settings=FULL)]
    check(cases, on_ranks(4, compare, cases))


@pytest.mark.slow
def test_copies_of_what_is_cut_without_slices():
    cases = [Case(2, copies=2, kind="mla", slices=False, number=3, options={"reduce_each": True})]
    check(cases, on_ranks(4, compare, cases))


@pytest.mark.slow
def test_copies_of_shards():
    cases = [Case(2, 2, copies=2), Case(2, 2, ep=4, copies=2, kind="moe", settings=FULL)]
    check(cases, on_ranks(8, compare, cases))


@pytest.mark.slow
def test_windows_and_layers_of_their_own_shape():
    cases = [Case(2, kind="windows", documents=True), Case(2, kind="windows", lora="keep", slices=False)]
    check(cases, on_ranks(2, compare, cases))


@pytest.mark.slow
def test_on_three_ranks():
    """Heads, widths and words that no power of two divides, rows whose slices do not come out even."""
    cases = [
        Case(3, kind="three"),
        Case(3, kind="three", length=14, documents=True),
        Case(3, kind="three", lora="keep"),
    ]
    check(cases, on_ranks(3, compare, cases))
