"""A mixture of experts whose matrices are cut: routed experts are sharded, or spread, over all ranks of a copy."""

import pytest

from tests.parallel.inside.tensor.cut import Case, compare
from tests.parallel.inside.tensor.test_parity import check
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist
FULL = {"activation_checkpoint": "full"}


@pytest.mark.support("experts", "tensor")
@pytest.mark.slow
def test_on_two_ranks():
    """The rest is whole then, but for what is cut; a rank without tokens of a row still meets the others."""
    cases = [Case(2, kind="moe"), Case(2, ep=2, kind="latent_moe", settings=FULL), Case(2, kind="moe", chunks=2)]
    check(cases, on_ranks(2, compare, cases))


def test_on_four_ranks():
    cases = [Case(2, 2, ep=4, kind="moe", options={"reduce_each": True}, number=3)]
    check(cases, on_ranks(4, compare, cases))


@pytest.mark.slow
def test_more_on_four_ranks():
    cases = [Case(2, 2, kind="latent_moe", settings=FULL), Case(4, ep=2, kind="moe"), Case(2, 2, ep=2, kind="moe")]
    check(cases, on_ranks(4, compare, cases))
