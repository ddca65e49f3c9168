"""Runs that learn hidden values of a teacher, streams and attention: both executors, resume, exports, settings, bad
input, plans."""

import shutil

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.cli.tuned import SHAPE
from tests.planner.rates import make_machine, make_rates, make_recipe
from tests.training.tiny import last_state, rows, tiny
from tilewright.cli.load_run import open_to_export
from tilewright.core.errors import ConfigError
from tilewright.models.distill.hidden import NAME
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.plan import Budget
from tilewright.planner.planner import Planner
from tilewright.training.session import train

QUICK = {"precision__mode": "fp32", "train__eval_interval": 0, "log__report": False, "train__sample_tokens": 0}


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    """A wider run of three layers."""
    shape = {"model__dim": 48, "model__num_layers": 3, "train__steps": 3}
    return train(tiny(data, tmp_path_factory.mktemp("teacher"), **QUICK | shape)).run_dir


def told(run, name="hidden"):
    return [row[name] for row in rows(run / "metrics.jsonl") if name in row]


def test_a_student_comes_nearer_to_hidden_values(teacher, data, tmp_path):
    """Than one for which they hardly count; the file of the run has their loss. What is exported has no projections."""
    options = QUICK | {"distill__teacher": teacher, "train__steps": 12}
    options |= {"distill__hidden": "{ 1 = 2 }", "distill__attention": "{ 0 = 1 }"}
    options |= {"optim__lr": 3e-3, "train__log_interval": 1}
    little = {"distill__hidden_weight": 1e-9, "distill__attention_weight": 1e-9}
    far = train(tiny(data, tmp_path, run__name="far", **options | little)).run_dir
    near = train(tiny(data, tmp_path, run__name="near", checkpoint__export_hf=True, **options)).run_dir
    for name in ("hidden", "attention"):
        assert told(near, name)[0] == pytest.approx(told(far, name)[0], rel=1e-6)
        assert told(near, name)[-1] < told(far, name)[-1]
    tensors, _ = last_state(near)
    assert tensors[f"model.{NAME}.projections.1"].shape == (48, 32)
    opened = open_to_export(near).model
    assert not [name for name, _ in opened.named_parameters() if NAME in name]
    again = open_to_export(train(tiny(
        data, tmp_path, run__name="again", model__path=near / "hf", model__weights="load", data__tokenizer=near / "hf",
        **QUICK | {"train__steps": 1, "optim__lr": 1e-9},
    )).run_dir).model  # fmt: skip
    first = opened.model.embed_tokens.weight
    assert (again.model.embed_tokens.weight - first).abs().max() < 1e-6


@pytest.mark.parametrize("executor", ["standard", pytest.param("layer_major", marks=pytest.mark.slow)])
def test_resume_equals_never_having_stopped(executor, teacher, data, tmp_path):
    options = QUICK | {"distill__teacher": teacher, "distill__hidden": "{ 0 = 1, 1 = 2 }"}
    options |= {"distill__attention": "{ 1 = 0 }", "memory__executor": executor, "optim__schedule": "constant"}
    whole = train(tiny(data, tmp_path, run__name="whole", train__steps=4, **options)).run_dir
    train(tiny(data, tmp_path, run__name="part", train__steps=2, **options))
    resumed = train(tiny(data, tmp_path, run__name="part", train__steps=4, **options)).run_dir
    (tensors, _), (expected, _) = last_state(resumed), last_state(whole)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


@pytest.mark.parametrize("offload", ["none", pytest.param("cpu", marks=pytest.mark.slow)])
def test_layer_major_learns_the_same(offload, teacher, data, tmp_path):
    options = QUICK | {
        "distill__teacher": teacher,
        "distill__hidden": "{ 0 = 1, 1 = 2 }",
        "distill__attention": "{ 1 = 0 }",
    }
    options |= {"model__tie_embeddings": False, "train__steps": 3}
    one = train(tiny(data, tmp_path, run__name="one", **options)).run_dir
    more = {"memory__executor": "layer_major", "memory__offload_params": offload}
    two = train(tiny(data, tmp_path, run__name="two", **options | more)).run_dir
    (tensors, _), (expected, _) = last_state(two), last_state(one)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


def test_settings_of_hidden_values_make_other_runs(data, tmp_path_factory, tmp_path):
    """A weight, a projection or none, which layers are paired, and in what."""
    equal = train(tiny(data, tmp_path_factory.mktemp("equal"), **QUICK | {"train__steps": 1})).run_dir
    options = QUICK | {"distill__teacher": equal, "train__steps": 2, "distill__hidden": "{ 0 = 0 }", "run__seed": 5}
    changes = ({}, {"distill__hidden_weight": 0.5}, {"distill__hidden_projection": "none"})
    attention = {"distill__hidden": "{}", "distill__attention": "{ 0 = 0 }"}
    changes += ({"distill__hidden": "{ 0 = 1 }"}, attention, attention | {"distill__attention_weight": 0.5})
    runs = [train(tiny(data, tmp_path, run__name=f"r{i}", **options | more)).run_dir for i, more in enumerate(changes)]
    states = [last_state(run)[0] for run in runs]
    weights = [state["model.model.embed_tokens.weight"] for state in states]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    assert [any(NAME in name for name in state) for state in states] == [True, True, False, True, True, True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"distill__hidden": "{ 2 = 0 }"}, "No such layer of the student"),
        ({"distill__attention": "{ 0 = 3 }"}, "No such layer of the teacher"),
        ({"distill__attention": "{ one = 1 }"}, "Layer is not a number"),
        ({"distill__hidden": "{ 0 = 3 }"}, "No such layer of the teacher"),
        ({"distill__hidden_projection": "none"}, "not equally wide"),
        ({"distill__hidden": "{ one = 1 }"}, "Layer is not a number"),
        ({"distill__cache": "rows"}, "not kept on disk"),
        ({"parallel__tp": 2}, "whole layers on each process"),
        ({"lora__rank": 4}, "not learned by adapters"),
    ],
)
def test_bad_pairs_say_why(changes, said, teacher, data, tmp_path):
    options = QUICK | {"distill__teacher": teacher, "distill__hidden": "{ 0 = 0 }"} | changes
    with pytest.raises(ConfigError, match=said) as error:
        train(tiny(data, tmp_path, **options))
    assert all(problem.got and problem.need and problem.try_ for problem in error.value.problems)


def test_a_layer_without_attention_is_named(teacher, data, tmp_path):
    """Layers of a search may have none; others of the same model can be learned."""
    shapes = "[{ num_heads = 0 }, {}]"
    options = QUICK | {"distill__teacher": teacher, "distill__attention": "{ 0 = 0 }", "model__layers": shapes}
    with pytest.raises(ConfigError, match="Layer of the student has no attention") as error:
        train(tiny(data, tmp_path, **options))
    assert error.value.problems[0].got == "layers 0 of Decoder"
    assert error.value.problems[0].need == "layers with one attention, as 1"


def test_without_a_teacher_there_is_nothing_to_learn(data, tmp_path):
    """Commands name the setting as unused then, as others of `[distill]`."""
    run = train(tiny(data, tmp_path, **QUICK | {"distill__hidden": "{ 0 = 0 }", "train__steps": 1})).run_dir
    assert not any(NAME in name for name in last_state(run)[0])


@pytest.fixture(scope="module")
def foreign(teacher, tmp_path_factory):
    """A folder of transformers' own layers with the teacher's tokens, narrower than it."""
    folder = tmp_path_factory.mktemp("foreign") / "qwen3"
    Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"vocab_size": 300, "tie_word_embeddings": False})).save_pretrained(folder)
    shutil.copy(teacher / "tokenizer.json", folder)
    return {"model__kind": "hf", "model__path": folder, "model__weights": "load", "train__steps": 3}


def test_a_student_of_transformers_learns_them(foreign, teacher, data, tmp_path):
    """Under both executors, bit for bit; its folder has no projections."""
    options = (
        QUICK
        | foreign
        | {"distill__teacher": teacher, "distill__hidden": "{ 0 = 1, 1 = 2 }", "distill__attention": "{ 1 = 0 }"}
    )
    more = {"train__log_interval": 1, "optim__lr": 3e-3, "checkpoint__export_hf": True}
    with pytest.raises(ConfigError, match="Attention of compiled layers"):
        train(tiny(data, tmp_path, train__compile="on", **options))
    one = train(tiny(data, tmp_path, run__name="one", **options | more)).run_dir
    two = train(tiny(data, tmp_path, run__name="two", memory__executor="layer_major", **options | more)).run_dir
    assert told(one)[-1] < told(one)[0]
    for name in ("hidden", "attention", "distillation", "cross_entropy"):
        assert told(two, name) == pytest.approx(told(one, name), rel=1e-6)
    (tensors, _), (expected, _) = last_state(two), last_state(one)
    assert expected[f"model.{NAME}.projections.1"].shape == (48, 32)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []
    assert not [name for name, _ in open_to_export(one).model.named_parameters() if NAME in name]
    with safe_open(one / "hf" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if NAME in name]  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"precision__mode": "bf16_mixed"},
        {"precision__mode": "fp8_tile"},
        {"precision__mode": "pure_fp16"},
        {"train__activation_checkpoint": "full"},
        {"train__activation_checkpoint": "full", "train__checkpoint_inputs": "fp8"},
        {"train__compile": "on", "distill__attention": "{}"},
    ],
)
def test_a_student_of_transformers_learns_them_in_every_format(changes, foreign, teacher, data, tmp_path):
    options = (
        QUICK
        | foreign
        | {"distill__teacher": teacher, "distill__hidden": "{ 0 = 1, 1 = 2 }", "distill__attention": "{ 1 = 0 }"}
    )
    options |= {"train__log_interval": 1, "optim__lr": 3e-3}
    plain = told(train(tiny(data, tmp_path, run__name="plain", **options)).run_dir)
    found = told(train(tiny(data, tmp_path, run__name="other", **options | changes)).run_dir)
    assert found[0] == pytest.approx(plain[0], rel=0.01)
    assert found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed"])
def test_a_student_of_transformers_learns_the_same_from_the_host(mode, foreign, teacher, data, tmp_path):
    """Layers that are fetched for each pass, beside the standard executor."""
    options = QUICK | foreign | {"distill__teacher": teacher, "distill__hidden": "{ 1 = 2 }", "precision__mode": mode}
    one = train(tiny(data, tmp_path, run__name="one", **options)).run_dir
    more = {"memory__executor": "layer_major", "memory__offload_params": "cpu"}
    two = train(tiny(data, tmp_path, run__name="two", **options | more)).run_dir
    (tensors, _), (expected, _) = last_state(two), last_state(one)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


@pytest.mark.slow
def test_layers_of_transformers_teach_those_of_transformers(foreign, data, tmp_path):
    """A model that learns from its own folder has nothing to learn from hidden values."""
    options = QUICK | foreign | {"distill__teacher": foreign["model__path"], "distill__hidden": "{ 0 = 0, 1 = 1 }"}
    options |= {"distill__attention": "{ 1 = 1 }"}
    options |= {"distill__hidden_projection": "none", "train__steps": 1}
    run = train(tiny(data, tmp_path, **options)).run_dir
    assert max(told(run)[0], told(run, "attention")[0]) < 1e-9


@pytest.mark.slow
def test_a_student_of_transformers_resumes_as_if_it_had_not_stopped(foreign, teacher, data, tmp_path):
    options = QUICK | foreign | {"distill__teacher": teacher, "distill__hidden": "{ 1 = 2 }"}
    options |= {"optim__schedule": "constant"}
    whole = train(tiny(data, tmp_path, run__name="whole", **options)).run_dir
    train(tiny(data, tmp_path, run__name="part", **options | {"train__steps": 2}))
    resumed = train(tiny(data, tmp_path, run__name="part", **options)).run_dir
    (tensors, _), (expected, _) = last_state(resumed), last_state(whole)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


@pytest.mark.parametrize("learned", ["learned", "none"])
def test_the_plan_counts_hidden_values(learned, teacher, tmp_path):
    """What is handed on of each token of a step, projections with gradients and states, and what losses keep."""
    sections = {"train": {"global_batch_size": 16, "micro_batch_size": 4}, "precision": {"mode": "fp32"}}
    distill = {"teacher": str(teacher)}
    alone, paired = (
        Planner(make_recipe(distill=distill | more, **sections), 300, make_machine(), make_rates()).as_it_stands(
            Budget(1e12, 1e12, Links(None, None))
        )
        for more in ({}, {"hidden": {"0": 0, "1": 2}, "attention": {"1": 1}, "hidden_projection": learned})
    )
    width, dim, tokens, at_once = 48, alone.shape.dim, 16 * alone.shape.seq_len, 4 * alone.shape.seq_len
    more = paired.phases["forward"]["process"] - alone.phases["forward"]["process"]
    projections = 3 * dim * width * 16 + at_once * dim * 4 if learned == "learned" else 0
    assert more == pytest.approx(3 * tokens * width * 4 + projections + 3 * at_once * (4 * width + 13))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"precision__mode": "bf16_mixed"},
        {"precision__mode": "fp8_tile"},
        {"precision__mode": "pure_fp16"},  # gradients have the loss scale
        {"precision__rules": '[{compute = "int4_a8"}]'},
        {"train__activation_checkpoint": "full", "train__checkpoint_inputs": "fp8"},
        {"precision__mode": "bf16_mixed", "optim__master_weights": "split24", "optim__moments": "8bit"},
        {"train__compile": "on"},
        {"optim__kind": "muon"},
        {"model__num_experts": 4},
    ],
)
def test_every_format_learns_them(changes, teacher, data, tmp_path):
    """From the same start, with a loss that falls. Bound: codes of four bits move a loss of 1.6 by 0.003."""
    options = QUICK | {
        "distill__teacher": teacher,
        "distill__hidden": "{ 0 = 1, 1 = 2 }",
        "distill__attention": "{ 1 = 0 }",
        "train__steps": 5,
    }
    options |= {"train__log_interval": 1, "optim__lr": 3e-3}
    plain = told(train(tiny(data, tmp_path, run__name="plain", **options)).run_dir)
    found = told(train(tiny(data, tmp_path, run__name="other", **options | changes)).run_dir)
    assert found[0] == pytest.approx(plain[0], rel=0.01)
    assert found[-1] < found[0]
