"""What stages cannot be together with is refused by its name, with a change that is accepted when it is made."""

from typing import get_args

import pytest

from tilewright.core.config.load import load_recipe
from tilewright.core.config.sections.parallel import ScheduleName
from tilewright.core.config.sections.stage_conflicts import REFUSED_WITH_STAGES
from tilewright.core.errors import ConfigError

STAGES = {"parallel.pp": "2", "model.tie_embeddings": "false", "optim.kind": "adamw"}
REFUSED = {
    "memory.executor": {"memory.executor": "layer_major"},
    "memory.plan": {"memory.plan": "plan.toml"},
    "train.compile": {
        "train.compile": "on",
        "parallel.schedule": "dualpipe_v",
        "model.kind": "hf",
        "model.path": "model",
    },
    "parallel.cpu_offload": {"parallel.cpu_offload": "true"},
    "parallel.reduce_each": {"parallel.reduce_each": "true"},
}


def load(**settings):
    return load_recipe(None, {**STAGES, **settings}, environ={}).recipe


def test_stages_alone_are_accepted():
    assert load(**{"precision.mode": "fp8_tile"}).executor == "pipeline"
    assert load().executor == "pipeline"
    assert load(**{"data.format": "preferences", "data.source": "pairs.jsonl"}).executor == "pipeline"
    assert load(**{"distill.teacher": "runs/teacher"}).executor == "pipeline"
    assert load(**{"parallel.pp": "1"}).executor == "standard"


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_both_ends_may_be_one_parameter(schedule):
    assert load(**{"model.tie_embeddings": "true", "parallel.schedule": schedule}).executor == "pipeline"


def test_each_row_of_the_table_has_a_case():
    assert {field for _, field, *_ in REFUSED_WITH_STAGES} == set(REFUSED) | {"model.task"}


@pytest.mark.support("layer_major", "stages", refused=True)
@pytest.mark.support("offload", "stages", refused=True)
@pytest.mark.parametrize("field", REFUSED)
def test_it_is_refused_by_name(field):
    with pytest.raises(ConfigError, match="cannot be cut into stages yet") as caught:
        load(**REFUSED[field])
    problem = next(one for one in caught.value.problems if "cannot be cut" in one.what)
    assert field in problem.got
    assert "parallel.pp = 2" in problem.got
    flag, value = problem.try_.split(", or ")[0].split(" or ")[0].split()[:2]
    assert flag == f"--{field}"
    load(**{**REFUSED[field], field: "" if value == '""' else value})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallel.schedule": "1fb1"}, "1f1b"),
        ({"parallel.schedule": "zbw"}, "zbv"),
        ({"model.num_layers": "3", "parallel.schedule": "zbv"}, "Fewer layers than stages"),
        ({"model.num_layers": "1"}, "Fewer layers than stages"),
        ({"model.num_layers": "3", "parallel.schedule": "interleaved"}, "Fewer layers than stages"),
        (
            {"model.kind": "hf", "model.path": "folder", "model.task": "image_classification"},
            "Image classifiers cannot",
        ),
        ({"parallel.pp": "0"}, "parallel.pp"),
        ({"parallel.virtual_stages": "1"}, "virtual_stages"),
        ({"parallel.split": "[2,2,2]"}, "not one of this model"),
        ({"parallel.split": "[4,1]"}, "not one of this model"),
        ({"parallel.split": "[6,0]"}, "not one of this model"),
        ({"parallel.split": "[2,2]", "parallel.schedule": "zbv"}, "not one of this model"),
    ],
)
def test_bad_input_is_a_users_error(settings, words):
    with pytest.raises(ConfigError, match=words):
        load(**settings)


@pytest.mark.parametrize("split", ["[7,1]", "[1,1]"])
def test_a_split_that_is_refused_comes_with_one_that_is_taken(split):
    with pytest.raises(ConfigError) as caught:
        load(**{"model.num_layers": "6", "parallel.split": split})
    (problem,) = caught.value.problems
    flag, value = problem.try_.split(", or ")[0].split()
    assert flag == "--parallel.split"
    assert load(**{"model.num_layers": "6", "parallel.split": value}).parallel.split == (3, 3)
