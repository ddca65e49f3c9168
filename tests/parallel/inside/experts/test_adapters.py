"""Adapters beside experts that are spread, and on them: gradients are those of one process."""

import pytest

from tests.parallel.inside.experts.spread import Case, compare
from tests.parallel.inside.experts.test_parity import FULL, check
from tests.parallel.inside.parity import LIKE_ONE_PROCESS, check_errors
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist
SOME = {"one": ("*.experts.0.*",), "dense": ("*.self_attn.*",)}


@pytest.mark.support("lora", "experts_spread")
@pytest.mark.support("lora_fp8", "experts_spread")
@pytest.mark.support("dropout", "experts_spread")
def test_on_two_ranks():
    """On all layers, of a base as it is, where inputs of an expert's adapters are dropped by the keys of their tokens,
    and of FP8 codes; and on one expert alone: its rank has gradients of experts, and sends rows of gradients back for a
    layer whose input needs none; on attention alone, beside frozen experts."""
    cases = [Case(2, lora="keep", dropout=0.3), Case(2, kind="deepseek", lora="fp8", settings=FULL)]
    some = [Case(2, lora="keep", targets=targets) for targets in SOME.values()]
    of_ranks = on_ranks(2, compare, cases + some)
    check(cases, [found[: len(cases)] for found in of_ranks])
    for rank, results in enumerate(of_ranks):
        assert all("lora_" in name for found in results for name in found["errors"]), "the base is frozen"
        for case, found in zip(some, results[len(cases) :], strict=True):
            own = [name for name in found["whole"] if ".experts." not in name or rank == 0]
            assert sorted(found["errors"]) == own
            if own:
                check_errors(case, rank, found, LIKE_ONE_PROCESS)


@pytest.mark.slow
def test_on_four_ranks():
    """In shards of what is spread, and in copies."""
    cases = [Case(2, 4, kind="deepseek", lora="keep", settings=FULL, dropout=0.1), Case(2, 2, 2, lora="fp8")]
    check(cases, on_ranks(4, compare, cases))
