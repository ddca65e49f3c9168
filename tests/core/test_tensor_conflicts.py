"""What cut matrices cannot be together with is refused by its name, with a change that is accepted."""

import pytest

from tests.core.refusals import check_numbers, check_refused, load
from tilewright.core.config.sections.tensor_conflicts import REFUSED_WITH_TENSORS

CUT = {"parallel.tp": "2"}
CONTROLLED = {"precision.mode": "fp8_tile", "precision.controller.enabled": "true"}
REFUSED = {
    "model.kind": {"model.kind": "tests.models.own:SPEC"},
    "parallel.cpu_offload": {"parallel.cpu_offload": "true"},
    "memory.executor": {"memory.executor": "layer_major"},
    "precision.rules": {"precision.rules": '[{match = "*", compute = "int8"}]'},
    "train.compile": {"train.compile": "on", "model.kind": "hf", "model.path": "some/folder"},
    "ops.cross_entropy": {"ops.cross_entropy": "ref"},
}


def test_cut_matrices_alone_are_accepted():
    assert load(CUT, {"precision.mode": "bf16_mixed", "train.compile": "on"}).parallel.tp == 2
    assert load(CUT, {"parallel.pp": "2", "parallel.schedule": "zbv", "model.num_layers": "8"}).parallel.tp == 2
    assert load(CUT, {"parallel.pp": "2", "model.kind": "hf", "model.path": "some/folder"}).parallel.tp == 2
    assert load(CUT, {"parallel.dp_shard": "2", "optim.moments": "8bit", "model.num_kv_heads": "2"}).parallel.tp == 2
    assert load(CUT, {"lora.rank": "4", "optim.master_weights": "stochastic"}).parallel.tp == 2
    assert load(CUT, {"precision.mode": "pure_fp16"}).parallel.tp == 2
    assert load(CUT, CONTROLLED).parallel.tp == 2
    assert load(CUT, CONTROLLED | {"lora.rank": "4", "lora.base": "keep", "lora.dropout": "0.1"}).parallel.tp == 2


def test_each_row_of_the_table_has_a_case():
    assert {field for _, field, *_ in REFUSED_WITH_TENSORS} == set(REFUSED)


@pytest.mark.support("offload", "tensor", refused=True)
@pytest.mark.support("integers", "tensor", refused=True)
@pytest.mark.support("layer_major", "tensor", refused=True)
@pytest.mark.parametrize("field", REFUSED)
def test_it_is_refused_by_name(field):
    check_refused(CUT, REFUSED[field], field, "cannot be with matrices that are cut", "parallel.tp = 2")


@pytest.mark.parametrize(
    ("settings", "what", "words"),
    [
        ({"model.num_heads": "6", "model.dim": "96", "parallel.tp": "4"}, "Heads that cannot be cut", "1, 2, 3, 6"),
        ({"model.num_kv_heads": "1"}, "Key and value heads that cannot be cut", "num_kv_heads = 1"),
        ({"model.ffn_dim": "90", "parallel.tp": "4"}, "Hidden width that cannot be cut", "1, 2, 3, 5"),
        ({"parallel.tp": "0"}, "parallel.tp", "1"),
    ],
)
def test_numbers_that_do_not_fit(settings, what, words):
    check_numbers(CUT, settings, what, words, helps=settings.get("parallel.tp") != "0")
