"""What a teacher adds to a plan: bytes against those that are counted as it runs, seconds against arithmetic."""

from dataclasses import replace

import pytest
import torch

from tests.cover import covering
from tests.planner.rates import make_machine, make_rates, make_recipe
from tests.training.tiny import tiny, write_text
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.build import build_model
from tilewright.models.distill import loss as distill
from tilewright.models.distill.kept_tokens import handed_on_bytes, keeping
from tilewright.models.teacher_folder import note_rows, stream_of
from tilewright.ops.kernels import Kernels
from tilewright.planner.cost import teacher_cost as costs
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.model.model_shape import ModelShape, TeacherShape
from tilewright.planner.plan import Budget
from tilewright.planner.planner import Planner
from tilewright.planner.trace.byte_counter import LiveBytes
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy
from tilewright.training.session import train

VOCAB = 300
LARGE = {"dim": 128, "num_layers": 3, "num_heads": 4}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run with a wider model than the student's."""
    folder = tmp_path_factory.mktemp("teacher")
    write_text(folder / "text")
    model = {f"model__{name}": value for name, value in LARGE.items()}
    return train(tiny(folder, folder, train__steps=1, train__eval_interval=0, log__report=False, **model)).run_dir


def plan(teacher="", machine=None, **sections):
    distill_section = {"teacher": str(teacher)} if teacher else {}
    recipe = make_recipe(distill=distill_section, **sections)
    planner = Planner(recipe, VOCAB, machine or make_machine(), make_rates())
    return planner.as_it_stands(Budget(1e12, 1e12, Links(None, None)))


def beside(teacher_shape: ModelShape, found: ModelShape, divergence: str = "forward_kl") -> ModelShape:
    """A student's shape with the teacher's."""
    return replace(found, teacher=TeacherShape(teacher_shape, 0.0, 0.0, divergence))


@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize(("dim", "rows", "seq_len"), [(128, 4, 128), (256, 2, 256)])
def test_bytes_of_its_forward_pass_are_those_that_are_alive(mode, dim, rows, seq_len):
    """Storages that operations make, weights left out; bound: the share is one number for all eager layers."""
    recipe = make_recipe(
        model={"dim": dim, "num_layers": 2, "num_heads": 4}, data={"seq_len": seq_len},
        train={"compile": "off"}, precision={"mode": mode},
    )  # fmt: skip
    kernels = Kernels.default()
    shape = Planner(recipe, VOCAB, kernels.machine, make_rates()).shape(recipe)
    model = build_model(recipe.model, VOCAB, kernels, torch.device("cpu")).eval().requires_grad_(False)
    convert(model, Policy(mode, (), device_type="cpu"), kernels=kernels)
    counted = LiveBytes()
    ids = torch.randint(VOCAB, (rows, seq_len))
    with torch.no_grad(), evaluation(model), counted:
        hidden = model.hidden({"input_ids": ids})
    planned = costs.forward_bytes(beside(shape, shape), rows)
    print(f"{planned=:.0f}, counted {counted.peak}")
    assert counted.peak == pytest.approx(planned, rel=0.15)
    assert hidden.element_size() == shape.stream_bytes


@pytest.mark.parametrize(
    ("divergence", "chunk_rows", "mode"),
    covering(tuple(distill.DIVERGENCES), (64, 256), ("fp32", "bf16_mixed"), pairs=False),
)
def test_bytes_of_the_loss_are_those_that_are_alive(mode, chunk_rows, divergence):
    words, tokens, width, theirs, chunk = 4000, 512, 64, 128, 4 * 4000 * chunk_rows
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    kernels = Kernels(Kernels.default().machine, loss_chunk_bytes=chunk)
    head = torch.nn.Linear(width, words, bias=False)
    if mode != "fp32":
        head.compute_dtype = dtype
    x_ND = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    batch = {
        "labels": torch.randint(words, (1, tokens)),
        distill.HIDDEN: torch.randn(1, tokens, theirs, dtype=dtype),
        distill.HEAD: torch.randn(words, theirs),
        distill.HOW: distill.how(1.0, 0.5, divergence),
    }
    counted = LiveBytes()
    with counted:
        distill.batch_loss(kernels, head, x_ND, batch).loss_sum.backward()
    models = [
        Planner(recipe, words, make_machine(), make_rates()).shape(recipe)
        for recipe in (
            make_recipe(model={"dim": dim, "num_heads": 2}, precision={"mode": mode}) for dim in (width, theirs)
        )
    ]
    gradient = 4 * words * width  # of the head: the plan has it with the gradients
    planned = costs.loss_bytes(beside(models[1], models[0], divergence), tokens, chunk, on_cpu=True) + gradient
    print(f"{planned=:.0f}, counted {counted.peak}")
    assert counted.peak == pytest.approx(planned, rel=0.15)


@pytest.mark.parametrize(
    ("loss", "chunk_rows", "mode"),
    covering(
        ((1.0, "forward_kl"), (2.0, "forward_kl"), (2.0, "reverse_kl")), (256, 512), ("fp32", "bf16_mixed"), pairs=False
    ),
)
def test_bytes_of_a_loss_from_kept_tokens_are_those_that_are_alive(loss, chunk_rows, mode):
    temperature, divergence = loss
    words, tokens, width, top_k, chunk = 4000, 512, 64, 32, 4 * 4000 * chunk_rows
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    kernels = Kernels(Kernels.default().machine, loss_chunk_bytes=chunk)
    head = torch.nn.Linear(width, words, bias=False)
    if mode != "fp32":
        head.compute_dtype = dtype
    x_ND = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    ids, logs = keeping(divergence).choose(torch.randn(tokens, words).log_softmax(-1), top_k, torch.rand(tokens))
    batch = {
        "labels": torch.randint(words, (1, tokens)),
        distill.TOKENS: ids[None],
        distill.LOGS: logs[None],
        distill.HOW: distill.how(temperature, 0.5, divergence),
    }
    counted = LiveBytes()
    with counted:
        distill.batch_loss(kernels, head, x_ND, batch).loss_sum.backward()
    shape = Planner(recipe := make_recipe(model={"dim": width, "num_heads": 2}, precision={"mode": mode}), words,
                    make_machine(), make_rates()).shape(recipe)  # fmt: skip
    taught = replace(shape, teacher=TeacherShape(shape, 0.0, 0.0, temperature=temperature, top_k=top_k))
    planned = costs.loss_bytes(taught, tokens, chunk, on_cpu=True) + 4 * words * width
    print(f"{planned=:.0f}, counted {counted.peak}")
    assert counted.peak == pytest.approx(planned, rel=0.15)


@pytest.mark.parametrize("executor", ["standard", "layer_major"])
def test_a_teacher_whose_rows_are_all_kept_is_not_counted(executor, teacher, tmp_path):
    """Neither its weights nor its forward pass; what is read is handed on as likeliest tokens."""
    section = {"teacher": str(teacher), "cache": str(tmp_path), "cache_top_k": 8}
    sections = {"train": {"steps": 5, "compile": "off"}, "memory": {"executor": executor}}
    found = []
    for steps in (4, 5):
        note_rows(tmp_path, stream_of(make_recipe(distill=section, **sections)), steps)
        recipe = make_recipe(distill=section, **sections)
        planner = Planner(recipe, VOCAB, make_machine(), make_rates())
        found.append(planner.as_it_stands(Budget(1e12, 1e12, Links(None, None))))
    counted, kept = found
    assert "forward, teacher" in counted.phases
    assert "forward, teacher" not in kept.phases
    assert kept.seconds.get("teacher", 0.0) < counted.seconds["teacher"]
    process = [one.phases[next(iter(one.phases))]["process"] for one in found]
    assert process[0] - process[1] == pytest.approx(counted.shape.teacher.weights)
    assert kept.shape.teacher.hidden == handed_on_bytes(8)
    assert "has all rows of this run" in kept.shape.notes[-1]


def test_its_forward_pass_is_a_phase_of_the_plan(teacher):
    """Only with a teacher, and nothing of its student is kept then."""
    sections = {"model": {"dim": 16, "num_layers": 1, "num_heads": 2}, "data": {"seq_len": 64}}
    machine = make_machine(device="cuda")
    found = plan(teacher, machine, train={"micro_batch_size": 16, "global_batch_size": 16}, **sections)
    without = plan("", machine, train={"micro_batch_size": 16, "global_batch_size": 16}, **sections)
    assert "forward, teacher" in found.phases
    assert "forward, teacher" not in without.phases
    work = found.phases["forward, teacher"]["work"]
    assert work == pytest.approx(costs.forward_bytes(found.shape, 16))
    assert found.phases["forward, teacher"]["activations"] == 0


@pytest.mark.parametrize("micro_batch_size", [4, 8])
@pytest.mark.parametrize("executor", ["standard", "layer_major"])
def test_seconds_are_more_by_its_forward_pass(micro_batch_size, executor, teacher):
    """Matmuls at the made-up rate by hand: each weight of a matrix once forward for each token; attention's pairs."""
    rates = {"elementwise": dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e30), "bandwidth": 1e30}
    sections = {
        "train": {"global_batch_size": 8, "micro_batch_size": micro_batch_size, "compile": "off"},
        "precision": {"mode": "fp32"}, "memory": {"executor": executor}, "data": {"seq_len": 128},
    }  # fmt: skip
    rates = make_rates(**rates)
    budget = Budget(1e12, 1e12, Links(None, None))
    alone, taught = (
        Planner(make_recipe(distill=found, **sections), VOCAB, make_machine(), rates).as_it_stands(budget)
        for found in ({}, {"teacher": str(teacher)})
    )
    parts = taught.seconds
    more = taught.step_s - alone.step_s
    assert parts["teacher"] > 0
    assert more == pytest.approx(parts["teacher"] + parts["loss"] - alone.seconds["loss"], rel=1e-6)
    model = taught.shape.teacher.model
    (layer,) = model.classes
    tokens = 8 * 128
    weights = sum(matmul.num_weights for matmul in layer.matmuls)
    matmuls = 2 * tokens * layer.count * weights / 1e12
    attention = layer.count * 8 * layer.attention_flops / 1e11
    passes = taught.setting.passes if executor == "layer_major" else 1
    logits = passes * 2 * tokens * VOCAB * (2 * LARGE["dim"] + taught.shape.dim) / 1e12
    assert parts["teacher"] == pytest.approx(matmuls + attention + logits, rel=1e-3)
