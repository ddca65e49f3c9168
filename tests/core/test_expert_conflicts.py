"""What spread experts cannot be together with is refused by its name, with a change that is accepted."""

import pytest

from tests.core.refusals import check_numbers, check_refused, load
from tilewright.core.config.sections.expert_conflicts import REFUSED_WITH_EXPERTS

SPREAD = {"parallel.ep": "2", "model.num_experts": "8", "optim.kind": "adamw"}
REFUSED = {
    "memory.executor": {"memory.executor": "layer_major"},
    "parallel.cpu_offload": {"parallel.cpu_offload": "true"},
}


def test_spread_experts_alone_are_accepted():
    assert load(SPREAD, {"precision.mode": "fp8_tile"}).parallel.ep == 2
    assert load(SPREAD, {"parallel.dp_shard": "4", "optim.kind": "muon"}).parallel.ep == 2
    assert load(SPREAD, {"parallel.pp": "2", "model.tie_embeddings": "false"}).executor == "pipeline"
    assert load(SPREAD, {"lora.rank": "4"}).parallel.ep == 2
    assert load(SPREAD, {"precision.mode": "fp8_tile", "precision.controller.enabled": "true"}).parallel.ep == 2


def test_each_row_of_the_table_has_a_case():
    assert {field for _, field, *_ in REFUSED_WITH_EXPERTS} == set(REFUSED)


@pytest.mark.support("offload", "experts_spread", refused=True)
@pytest.mark.support("layer_major", "experts_spread", refused=True)
@pytest.mark.parametrize("field", REFUSED)
def test_it_is_refused_by_name(field):
    check_refused(SPREAD, REFUSED[field], field, "cannot be with experts on several processes yet", "parallel.ep = 2")


@pytest.mark.parametrize(
    ("settings", "what", "words"),
    [
        ({"model.num_experts": "0"}, "Dense model has no experts", "num_experts = 0"),
        ({"parallel.ep": "3"}, "do not come out even over the processes", "1, 2, 4, 8"),
        ({"parallel.ep": "16", "parallel.dp_shard": "16"}, "do not come out even over the processes", "1, 2, 4, 8"),
        ({"parallel.ep": "4", "parallel.dp_shard": "6"}, "do not come out even over the shards", "dp_shard = 6"),
        (
            {"parallel.ep": "4", "parallel.dp_shard": "3", "parallel.tp": "2", "model.num_heads": "8"},
            *("do not come out even over the shards", "parallel.tp = 2"),
        ),
        ({"parallel.ep": "0"}, "parallel.ep", "1"),
        ({"parallel.redundant_experts": "2"}, "Redundant experts that nothing chooses", "place_experts = 'off'"),
        (
            {"parallel.redundant_experts": "5", "parallel.place_experts": "on"},
            *("More redundant experts than other processes have", "at most 4"),
        ),
        ({"parallel.redundant_experts": "-1"}, "parallel.redundant_experts", "0"),
    ],
)
def test_numbers_that_do_not_fit(settings, what, words):
    check_numbers(SPREAD, settings, what, words, helps=not what.startswith("parallel."))


def test_numbers_that_no_setting_can_say_yet():
    assert load(SPREAD, {"parallel.ep": "4"}).parallel.dp_shard == -1, "the number of processes decides"
