"""What a part of a model is (a head, a router, a matrix of a hidden layer) does not depend on which rank holds it."""

import pytest

from tests.models.shapes import SHAPES
from tests.parallel.pipeline.ragged import decoder
from tilewright.models.base.hidden_matrices import hidden_matrices
from tilewright.models.base.output_layers import find_heads
from tilewright.models.base.routers import find_routers
from tilewright.parallel.pipeline.rank_stages import hold_stages
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import Group
from tilewright.precision.assign.conversion_plan import decide_all
from tilewright.precision.policy.policy import Policy


def _kinds(model):
    names = {param: name for name, param in model.named_parameters()}
    modules = dict((module, name) for name, module in model.named_modules())
    return {
        "matrices": {names[matrix] for matrix in hidden_matrices(model)},
        "heads": {modules[head] for head in find_heads(model)},
        "routers": {modules[router] for router in find_routers(model)},
        "names": set(names.values()),
    }


@pytest.mark.parametrize("kind", [kind for kind in SHAPES if kind != "tied"])
@pytest.mark.parametrize(
    ("pipeline", "layers"), [(Pipeline(2), 2), (Pipeline(2, "interleaved", 2), 5), (Pipeline(3), 4), (Pipeline(5), 5)]
)
def test_parts_of_ranks_are_those_of_the_whole(kind, pipeline, layers):
    whole = _kinds(decoder(kind, layers))
    ranks = [
        _kinds(hold_stages(decoder(kind, layers), pipeline, Group(rank, pipeline.pp))) for rank in range(pipeline.pp)
    ]
    for what, names in whole.items():
        assert sorted(name for of_rank in ranks for name in of_rank[what]) == sorted(names), what


def _decisions(model, mode):
    found = decide_all(model, Policy(mode, device_type="cpu"))
    return {site.fqn: (site.kind, decision.operands, decision.storage) for site, decision in found.sites}


@pytest.mark.parametrize("mode", ["bf16_mixed", "hybrid", "fp8_tile", "fp32"])
def test_formats_of_ranks_are_those_of_the_whole(mode):
    """They are decided again after an evaluation and with a new mode, when a rank has its own part alone."""
    for kind, pipeline, layers in (("gqa", Pipeline(2), 2), ("deepseek", Pipeline(3), 3)):
        whole = _decisions(decoder(kind, layers), mode)
        ranks = {}
        for rank in range(pipeline.pp):
            ranks |= _decisions(hold_stages(decoder(kind, layers), pipeline, Group(rank, pipeline.pp)), mode)
        ranks = {name: found for name, found in ranks.items() if name in whole}
        assert ranks == whole
