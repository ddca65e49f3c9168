"""A teacher beside a run: the loss against plain PyTorch in FP64, and runs with one."""

import pytest
import torch
from torch.nn import functional as F

from tests.cli.tuned import make_model
from tests.planner.rates import make_machine, make_rates, make_recipe
from tests.training.tiny import last_state, rows, tiny
from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.distill import loss as distill
from tilewright.models.hf.load import load_hf
from tilewright.ops.kernels import Kernels
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.plan import Budget
from tilewright.planner.planner import Planner
from tilewright.training.session import train


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    """A run to learn from."""
    return train(tiny(data, tmp_path_factory.mktemp("teacher"), precision__mode="fp32")).run_dir


@pytest.fixture
def taught_batch():
    draw = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 50, (2, 9), generator=draw)
    labels[0, :3] = -100
    ids = torch.randint(0, 50, (2, 9), generator=draw)
    head, hidden = torch.randn(50, 12, generator=draw), torch.randn(2, 9, 12, generator=draw)
    how = {distill.HIDDEN: hidden, distill.HEAD: head, distill.HOW: distill.how(2.0, 0.75, "forward_kl")}
    return {"input_ids": ids, "labels": labels} | how


def divergence_of(theirs_NV, ours_NV, name):
    """From logits, of each row."""
    p, q = theirs_NV.softmax(-1), ours_NV.softmax(-1)
    m = (p + q) / 2
    forward, reverse = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
    middle = ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2
    return {"forward_kl": forward, "reverse_kl": reverse, "jensen_shannon": middle}[name]


def by_hand(logits_NV, batch, name="forward_kl"):
    """In FP64, from whole logits."""
    temperature, weight = 2.0, 0.75
    kept = batch["labels"].flatten() != -100
    theirs = (batch[distill.HIDDEN].double().flatten(0, 1) @ batch[distill.HEAD].double().T)[kept] / temperature
    ours, labels = logits_NV.double()[kept], batch["labels"].flatten()[kept]
    divergence = divergence_of(theirs, ours / temperature, name).sum() * temperature**2
    return (1 - weight) * F.cross_entropy(ours, labels, reduction="sum") + weight * divergence


def small(chunk_bytes):
    torch.manual_seed(0)
    kernels = Kernels(Kernels.default().machine, loss_chunk_bytes=chunk_bytes)
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_dim": 16}
    model = Decoder(DecoderConfig(vocab_size=50, **shape), kernels)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3) if param.ndim > 1 else torch.nn.init.ones_(param)
    return model


@pytest.mark.parametrize("name", distill.DIVERGENCES)
@pytest.mark.parametrize("chunk_bytes", [1, 800, 2**20])
@pytest.mark.support("teacher", "one")
def test_loss_and_gradients_are_those_of_whole_logits(taught_batch, chunk_bytes, name):
    model = small(chunk_bytes)
    taught_batch[distill.HOW] = distill.how(2.0, 0.75, name)
    out = model.loss(taught_batch)
    out.loss_sum.backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    expected = by_hand(model(taught_batch["input_ids"]).flatten(0, 1), taught_batch, name)
    expected.backward()
    assert int(out.count) == 15
    # bound: FP32 sums of 15 rows of 50 logits
    assert abs(float(out.loss_sum.detach() - expected.detach())) < 1e-4 * float(expected)
    for name, param in model.named_parameters():
        assert (found[name] - param.grad).abs().max() < 1e-4 * param.grad.abs().max(), name
    parts = out.aux["cross_entropy"] * 0.25 + out.aux["distillation"] * 0.75
    assert abs(float(parts) * 15 - float(expected)) < 1e-3


def test_a_hugging_face_student_has_the_same_loss(taught_batch, tmp_path):
    model = load_hf(make_model(tmp_path / "llama", "llama"), "causal_lm", "load")
    taught_batch[distill.HEAD] = torch.randn(400, 12)
    expected = by_hand(model.net(input_ids=taught_batch["input_ids"]).logits.detach().flatten(0, 1), taught_batch)
    assert abs(float(model.loss(taught_batch).loss_sum.detach() - expected)) < 1e-4 * float(expected)


def test_a_student_comes_nearer_to_its_teacher_than_without(teacher, data, tmp_path):
    """The same data and start; a student that sees only the teacher, at its temperature."""
    options = {"precision__mode": "fp32", "run__seed": 5, "train__steps": 8, "optim__lr": 3e-3, "model__dim": 16}
    shown = {"distill__teacher": teacher, "distill__weight": 1.0}
    alone = train(tiny(data, tmp_path, run__name="alone", **options, **shown | {"distill__weight": 1e-9})).run_dir
    taught = train(tiny(data, tmp_path, run__name="taught", **options, **shown)).run_dir
    found = [[row for row in rows(run / "metrics.jsonl") if "distillation" in str(row)][-1] for run in (alone, taught)]
    far, near = (row.get("distillation", row.get("aux", {}).get("distillation")) for row in found)
    assert near < far


@pytest.mark.parametrize("name", distill.DIVERGENCES)
def test_a_student_that_equals_its_teacher_has_no_divergence(taught_batch, name):
    """And no gradient from it; far from its teacher each divergence is above zero, and finite at large logits."""
    model = small(800)
    with torch.no_grad():
        hidden = model.hidden({"input_ids": taught_batch["input_ids"]})
    same = {
        distill.HIDDEN: hidden,
        distill.HEAD: model.lm_head.weight.detach(),
        distill.HOW: distill.how(1.0, 1.0, name),
    }
    out = model.loss(taught_batch | same)
    out.loss_sum.backward()
    assert abs(float(out.loss_sum.detach())) < 1e-4
    assert max(float(param.grad.abs().max()) for param in model.parameters()) < 1e-4
    far = taught_batch | same | {distill.HIDDEN: 300 * taught_batch[distill.HIDDEN][..., :1].expand_as(hidden)}
    found = float(model.loss(far).loss_sum.detach())
    assert 0 < found < float("inf")


def test_another_divergence_is_another_run(teacher, data, tmp_path):
    options = {"precision__mode": "fp32", "distill__teacher": teacher, "train__steps": 2, "log__report": False}
    runs = [
        train(tiny(data, tmp_path, run__name=name, distill__divergence=name, **options)).run_dir
        for name in distill.DIVERGENCES
    ]
    losses = {rows(run / "metrics.jsonl")[-1]["eval"]["alpha"]["loss"] for run in runs}
    assert len(losses) == 3


@pytest.mark.parametrize(
    "executor", [pytest.param(name, marks=pytest.mark.slow) for name in ("standard", "layer_major")]
)
def test_resume_equals_never_having_stopped(teacher, data, tmp_path, executor):
    options = {
        "precision__rules": '[{compute = "int4_a8"}]', "distill__teacher": teacher, "distill__temperature": 2.0,
        "memory__executor": executor, "optim__schedule": "constant", "train__eval_interval": 0,
    }  # fmt: skip
    whole = train(tiny(data, tmp_path, run__name="whole", train__steps=4, **options)).run_dir
    train(tiny(data, tmp_path, run__name="part", train__steps=2, **options))
    resumed = train(tiny(data, tmp_path, run__name="part", train__steps=4, **options)).run_dir
    (tensors, _), (expected, _) = last_state(resumed), last_state(whole)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


def test_layer_major_learns_the_same(teacher, data, tmp_path):
    options = {"precision__mode": "fp32", "model__tie_embeddings": False, "distill__teacher": teacher}
    options |= {"log__report": False}
    one = train(tiny(data, tmp_path, run__name="one", **options)).run_dir
    two = train(tiny(data, tmp_path, run__name="two", memory__executor="layer_major", **options)).run_dir
    (tensors, _), (expected, _) = last_state(two), last_state(one)
    assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


@pytest.mark.parametrize("kind", ["run", pytest.param("folder", marks=pytest.mark.slow)])
def test_the_plan_counts_the_teacher(kind, teacher, tmp_path):
    """Its weights in FP32, and what it hands on of each token of a step: on every process, whole."""
    if kind == "run":
        tensors, _ = last_state(teacher)
        weights, width = sum(t.numel() for name, t in tensors.items() if name.startswith("model.")), 32
    else:
        teacher = make_model(tmp_path / "qwen3", "qwen3")
        net = load_hf(teacher, "causal_lm").net
        weights, width = sum(param.numel() for param in net.parameters()), net.config.hidden_size
    train = {"global_batch_size": 16, "micro_batch_size": 4}
    for parallel, tokens, mode, size in (({}, 16 * 128, "fp32", 4), ({"dp_shard": 4}, 4 * 128, "bf16_mixed", 2)):
        alone, taught = (
            Planner(
                make_recipe(train=train, parallel=parallel, distill=distill, precision={"mode": mode}),
                300, make_machine(), make_rates(),
            ).as_it_stands(Budget(1e12, 1e12, Links(None, None)))
            for distill in ({}, {"teacher": str(teacher)})
        )  # fmt: skip
        more = taught.phases["forward"]["process"] - alone.phases["forward"]["process"]
        assert more == pytest.approx(4 * weights + size * width * tokens, rel=1e-3)  # buffers of rotary embeddings
        assert any("whole on each process" in note for note in taught.notes)


def test_bad_teachers_say_why(teacher, data, tmp_path):
    with pytest.raises(ConfigError, match="No such teacher"):
        train(tiny(data, tmp_path, distill__teacher="nowhere"))
    other = make_model(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError, match="another vocabulary"):
        train(tiny(data, tmp_path, run__name="b", distill__teacher=other))
    with pytest.raises(ConfigError, match="causal language model and one answer"):
        tiny(data, tmp_path, distill__teacher=teacher, data__format="preferences", train__micro_batch_size=2)


def test_another_teacher_does_not_continue_the_run(teacher, data, tmp_path):
    student = {"run__name": "held", "distill__teacher": teacher, "train__steps": 4}
    train(tiny(data, tmp_path, **student))
    second = train(tiny(data, tmp_path, run__name="second", run__seed=9, precision__mode="fp32")).run_dir
    with pytest.raises(CheckpointError, match="Teacher has other weights"):
        train(tiny(data, tmp_path, **student | {"distill__teacher": second, "train__steps": 8}))
