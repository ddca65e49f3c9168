"""What cut matrices cannot be together with is refused by its name, with a change that is accepted."""

import shlex

import pytest

from tilewright.core.config.load import load_recipe
from tilewright.core.config.sections.tensor_conflicts import REFUSED_WITH_TENSORS
from tilewright.core.errors import ConfigError

CUT = {"parallel.tp": "2"}
REFUSED = {
    "model.kind": {"model.kind": "hf", "model.path": "some/folder"},
    "parallel.pp": {"parallel.pp": "2", "model.tie_embeddings": "false"},
    "parallel.dp_replicate": {"parallel.dp_replicate": "2"},
    "parallel.cpu_offload": {"parallel.cpu_offload": "true"},
    "memory.executor": {"memory.executor": "layer_major"},
    "lora.rank": {"lora.rank": "4"},
    "distill.teacher": {"distill.teacher": "some/folder"},
    "optim.master_weights": {"optim.master_weights": "stochastic"},
    "precision.mode": {"precision.mode": "pure_fp16"},
    "precision.controller.enabled": {"precision.mode": "fp8_tile", "precision.controller.enabled": "true"},
    "precision.rules": {"precision.rules": '[{match = "*", compute = "int8"}]'},
    "train.compile": {"train.compile": "on"},
    "ops.cross_entropy": {"ops.cross_entropy": "ref"},
}


def load(**settings):
    return load_recipe(None, {**CUT, **settings}, environ={}).recipe


def accepted(try_, **settings):
    """A recipe is loaded with the first change that an error names."""
    words = shlex.split(try_.split(", or ")[0].split(": ")[0])
    changes = {words[at].removeprefix("--"): words[at + 1] for at in range(0, len(words), 2)}
    load(**{**settings, **changes})


def test_cut_matrices_alone_are_accepted():
    assert load(**{"precision.mode": "bf16_mixed"}).parallel.tp == 2
    assert load(**{"parallel.dp_shard": "2", "optim.moments": "8bit", "model.num_kv_heads": "2"}).parallel.tp == 2


def test_each_row_of_the_table_has_a_case():
    assert {field for _, field, *_ in REFUSED_WITH_TENSORS} == set(REFUSED)


@pytest.mark.support("hf", "tensor", refused=True)
@pytest.mark.support("lora", "tensor", refused=True)
@pytest.mark.support("fp16", "tensor", refused=True)
@pytest.mark.support("controller", "tensor", refused=True)
@pytest.mark.support("offload", "tensor", refused=True)
@pytest.mark.support("integers", "tensor", refused=True)
@pytest.mark.support("teacher", "tensor", refused=True)
@pytest.mark.support("compiled", "tensor", refused=True)
@pytest.mark.support("layer_major", "tensor", refused=True)
@pytest.mark.parametrize("field", REFUSED)
def test_it_is_refused_by_name(field):
    with pytest.raises(ConfigError, match="cannot be with matrices that are cut") as caught:
        load(**REFUSED[field])
    problem = next(one for one in caught.value.problems if "matrices that are cut" in one.what and field in one.got)
    assert "parallel.tp = 2" in problem.got
    accepted(problem.try_, **REFUSED[field])


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
    with pytest.raises(ConfigError) as caught:
        load(**settings)
    problem = next(one for one in caught.value.problems if what in f"{one.what} {one.where}")
    assert words in f"{problem.got} {problem.need}"
    if settings.get("parallel.tp") != "0":
        accepted(problem.try_, **settings)
