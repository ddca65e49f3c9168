"""Conversion of whole models: tilewright's decoder, plain PyTorch nets; switching, evaluating, reporting."""

import copy
import logging

import pytest
import torch
from torch import nn

from tests.cover import covering
from tests.ops.compare import assert_snr
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.hardware import detect_machine
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.precision.convert import convert, evaluating, explain, set_mode
from tilewright.precision.policy.gemm_formats import SCALED_FORMATS
from tilewright.precision.policy.policy import MODES, Policy, Rule

KERNELS = Kernels(detect_machine(), compile=False)
FOUR_BITS = ("mxfp4", "nvfp4")
STREAM = {mode: torch.bfloat16 for mode in ("bf16_mixed", *SCALED_FORMATS)} | {"pure_fp16": torch.float16}


def decoder(**shape) -> Decoder:
    config = DecoderConfig.of(**({"vocab_size": 60, "dim": 32, "num_heads": 4, "num_layers": 2} | shape))
    model = Decoder(config, KERNELS)
    init_weights(model, seed=0)
    return model


def batch(vocab: int = 60) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocab, (2, 25), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def loss_and_gradient(model: nn.Module) -> tuple[float, torch.Tensor]:
    out = model.loss(batch())
    out.loss_sum.backward()
    return out.loss_sum.item(), torch.cat([p.grad.double().flatten() for p in model.parameters()])


class SmallResNet(nn.Module):
    """Convolutions, batch norms, a residual, a linear head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.norm1(self.stem(x)))
        x = torch.relu(x + self.norm2(self.conv(x)))
        return self.classifier(x.mean((2, 3)))


# ---- tilewright's decoder ----


@pytest.mark.parametrize(
    ("mode", "shape"),
    covering(tuple(MODES), ({}, {"num_experts": 4}, {"attention": "mla", "tie_embeddings": False}), pairs=False),
)
def test_decoder_in_every_mode_is_near_fp32(mode, shape):
    plain = decoder(**shape)
    loss, gradient = loss_and_gradient(plain)
    model = decoder(**shape)
    names = list(model.state_dict())
    convert(model, mode, kernels=KERNELS)
    got, got_gradient = loss_and_gradient(model)
    bound = {"fp32": 0.0, "tf32": 2e-5, "bf16_mixed": 2e-3, "hybrid": 2e-3, "pure_fp16": 2e-4}.get(mode, 4e-3)
    bound = 2e-2 if mode in FOUR_BITS else bound
    assert abs(got - loss) <= bound * loss, f"{got} against {loss}"
    cosine = torch.cosine_similarity(got_gradient, gradient, dim=0).item()
    least = {"fp32": 1 - 1e-9, "tf32": 1 - 1e-5, "pure_fp16": 1 - 1e-4}.get(mode, 1 - 3e-3)
    # An element in E2M1 errs by up to a quarter of itself, in E4M3 by a sixteenth.
    least = 0.9 if mode in FOUR_BITS else 0.985 if mode in SCALED_FORMATS else least
    assert cosine > least, cosine
    assert list(model.state_dict()) == names
    assert model.hidden(batch()).dtype == STREAM.get(mode, torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_keep_their_identity_and_fp32_but_in_pure_fp16(mode):
    model = decoder(num_experts=4)
    before = dict(model.named_parameters())
    convert(model, mode, kernels=KERNELS)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    for name, parameter in after.items():
        keeps = mode != "pure_fp16" or parameter.ndim == 1 or name.endswith("mlp.gate.weight")
        assert parameter.dtype == (torch.float32 if keeps else torch.float16), name


def test_decoder_attention_is_a_rule_of_its_own():
    model = decoder()
    report = convert(
        model, Policy("bf16_mixed", (Rule("*.0.*", op="attention", compute="fp32"),)), kernels=KERNELS
    ).precision_report
    cores = [block.self_attn.core.compute_dtype for block in model.blocks]
    assert cores == [torch.float32, torch.bfloat16]
    assert report.unmatched == ()


@pytest.mark.slow
def test_decoder_is_compiled_whole_layer_by_layer():
    """Dynamo's own backend without code generation: what matters is that there is one graph and no break."""
    eager, compiled = decoder(), decoder()
    for model in (eager, compiled):
        convert(model, "bf16_mixed", kernels=KERNELS)
    torch.compiler.reset()
    for block in compiled.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for mode in ("bf16_mixed", "tf32", "bf16_mixed"):
        set_mode(eager, mode)
        set_mode(compiled, mode)
        want, got = loss_and_gradient(eager), loss_and_gradient(compiled)
        assert got[0] == pytest.approx(want[0], rel=1e-6)
        assert_snr(got[1], want[1], at_least_db=40.0, name=mode)  # BF16 gradients round in another order
    torch.compiler.reset()


@pytest.mark.parametrize("recompute", ["selective", "matmuls", "attention", "full"])
@pytest.mark.parametrize("mode", ["bf16_mixed", "hybrid", "tf32"])
def test_recomputation_changes_nothing(mode, recompute):
    plain, model = decoder(), decoder()
    convert(plain, mode, kernels=KERNELS)
    convert(model, mode, kernels=KERNELS)
    model.activation_checkpoint = recompute
    want, got = loss_and_gradient(plain), loss_and_gradient(model)
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("mode", ["bf16_mixed", "pure_fp16"])
def test_gradients_accumulate_in_fp32(mode):
    model = decoder()
    convert(model, mode, kernels=KERNELS)
    once = loss_and_gradient(model)[1]
    twice = loss_and_gradient(model)[1]
    torch.testing.assert_close(twice, 2 * once, rtol=2e-3, atol=1e-5)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_pure_fp16_trains_with_masters_in_the_optimizer():
    model = decoder()
    convert(model, "pure_fp16", kernels=KERNELS)
    optimizer = DeepSeekAdam(model.parameters(), lr=1e-2, kernels=KERNELS)
    losses = []
    for _ in range(8):
        out = model.loss(batch())
        (out.loss_sum / out.count).backward()
        losses.append(out.loss_sum.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    weight = model.blocks[0].mlp.up_proj.weight
    assert optimizer.state[weight]["master"].dtype == torch.float32


def test_bf16_parameters_train_by_stochastic_rounding():
    model = decoder()
    convert(model, Policy("bf16_mixed", parameters="bf16"), kernels=KERNELS)
    assert {p.dtype for p in model.parameters() if p.ndim > 1} == {torch.bfloat16}
    optimizer = DeepSeekAdam(model.parameters(), lr=1e-2, master="stochastic", kernels=KERNELS)
    losses = []
    for _ in range(8):
        out = model.loss(batch())
        (out.loss_sum / out.count).backward()
        losses.append(out.loss_sum.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert all("master" not in state for state in optimizer.state.values())
    with evaluating(model):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight.dtype == torch.bfloat16


# ---- switching ----


def test_switch_keeps_the_optimizer_and_equals_a_fresh_conversion():
    switched, fresh = decoder(), decoder()
    convert(switched, "tf32", kernels=KERNELS)
    optimizer = torch.optim.SGD(switched.parameters(), lr=0.1)
    parameters = optimizer.param_groups[0]["params"]
    set_mode(switched, "bf16_mixed")
    convert(fresh, "bf16_mixed", kernels=KERNELS)
    want, got = loss_and_gradient(fresh), loss_and_gradient(switched)
    assert want[0] == got[0]
    assert torch.equal(want[1], got[1])
    assert all(ours is theirs for ours, theirs in zip(switched.parameters(), parameters, strict=True))
    assert switched.precision_report.policy.mode == "bf16_mixed"


def test_switch_by_mode_keeps_the_rules():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    convert(model, Policy("tf32", (Rule("1", compute="fp32"),)))
    report = set_mode(model, "bf16_mixed")
    assert [row.compute for row in report.rows[:2]] == ["bf16", "fp32"]


def test_switch_across_storage_formats_is_refused():
    model = nn.Linear(4, 4)
    convert(model, "bf16_mixed")
    with pytest.raises(ConfigError, match="cannot switch to pure_fp16"):
        set_mode(model, "pure_fp16")
    assert model.compute_dtype == torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_is_fp32_and_everything_comes_back(mode):
    model = decoder()
    convert(model, mode, kernels=KERNELS)
    reference = decoder()
    reference.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    before = loss_and_gradient(model)
    bits = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with evaluating(model), torch.no_grad():
        assert not model.training
        assert model.loss(batch()).loss_sum.item() == reference.loss(batch()).loss_sum.item()
    model.zero_grad()
    assert loss_and_gradient(model)[0] == before[0]
    assert model.training
    assert all(torch.equal(parameter, bits[name]) for name, parameter in model.named_parameters())
    assert model.precision_report.policy.mode == mode


def test_evaluation_restores_each_modules_own_training_flag_after_an_error():
    model = SmallResNet()
    convert(model, "bf16_mixed")
    model.norm1.eval()
    with pytest.raises(ValueError, match="stop"), evaluating(model):
        raise ValueError("stop")
    assert (model.training, model.norm1.training, model.norm2.training) == (True, False, True)
    assert model.conv.compute_dtype == torch.bfloat16


@pytest.mark.parametrize("call", [lambda m: set_mode(m, "fp32"), lambda m: evaluating(m).__enter__()])
def test_a_model_that_is_not_converted_is_an_error(call):
    with pytest.raises(ConfigError, match="not converted"):
        call(nn.Linear(2, 2))


def test_converting_twice_equals_converting_once():
    once, twice = SmallResNet(), SmallResNet()
    twice.load_state_dict(once.state_dict())
    convert(once, "bf16_mixed")
    convert(twice, "tf32")
    convert(twice, "bf16_mixed")
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(once(x), twice(x))


# ---- plain PyTorch nets ----


@pytest.mark.parametrize("low", ["fp16", "bf16"])
def test_conv_in_16_bit_with_batch_norm_in_fp32_trains_like_fp32(low):
    """The articles' advice for vision, in a plain loop."""
    torch.manual_seed(0)
    plain, model = SmallResNet(), SmallResNet()
    model.load_state_dict(plain.state_dict())
    convert(model, Policy("fp32", (Rule(op="conv", compute=low),)))
    x, labels = torch.randn(16, 3, 12, 12), torch.randint(0, 10, (16,))
    losses = {}
    for name, net in (("plain", plain), ("model", model)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        losses[name] = []
        for _ in range(6):
            loss = nn.functional.cross_entropy(net(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["model"] == pytest.approx(losses["plain"], rel=0.02)
    assert losses["model"][-1] < losses["model"][0]
    assert model.norm1.running_mean.dtype == torch.float32
    rows = {row.fqn: row.compute for row in model.precision_report.rows}
    assert (rows["conv"], rows["norm1"], rows["classifier"]) == (low, "fp32", "fp32")


def test_tied_weights_stay_tied_and_get_both_gradients():
    embedding, head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    convert(model, "bf16_mixed")
    assert model[1].weight is model[0].weight
    model(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    assert model[0].weight.grad[1].abs().sum() > model[0].weight.grad[5].abs().sum()
    assert model.precision_report.rows[1].op == "head"


def test_16_bit_weights_become_fp32_masters_and_the_report_says_so():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    report = convert(model, "bf16_mixed").precision_report
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model[1].running_var.dtype == torch.float32
    assert any("4 parameters changed dtype" in note for note in report.notes)


def test_meta_models_can_be_explained():
    with torch.device("meta"):
        model = SmallResNet()
    rows = explain(model, "bf16_mixed")
    assert [row.op for row in rows[:5]] == ["conv", "batch_norm", "conv", "batch_norm", "linear"]
    assert type(model.conv) is nn.Conv2d


# ---- reporting ----


def test_rules_without_effect_are_said(caplog):
    rules = (
        Rule("norm*", compute="bf16"),
        Rule("conv", compute="fp16"),
        Rule("conv", compute="tf32"),
    )
    with caplog.at_level(logging.WARNING):
        report = convert(SmallResNet(), Policy("bf16_mixed", rules, fp32_ops=("embedding",))).precision_report
    assert [text.split(":")[0] for text in report.unmatched] == ["rule 1", "rule 2", 'fp32_ops "embedding"']
    assert caplog.text.count("no effect") == 3
    assert "no effect: rule 1" in str(report)


def test_rules_that_match_nothing_are_errors_with_near_names():
    rules = (Rule("cnov", compute="fp32"), Rule("conv", op="linear", compute="fp32"), Rule("conv", compute="fp32"))
    model = SmallResNet()
    with pytest.raises(ConfigError) as error:
        convert(model, Policy("bf16_mixed", rules))
    first, second = error.value.problems
    assert "conv" in first.need
    assert first.try_ == 'match = "*conv"'
    assert "op one of" in second.need
    assert type(model.conv) is nn.Conv2d  # nothing was changed


@pytest.mark.parametrize("mode", ["fp8_tile", "tf32"])
def test_strict_refuses_what_is_emulated(mode):
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(HardwareError) as error:
        convert(model, Policy(mode, device_type="cpu", strict=True))
    (problem,) = error.value.problems
    assert all((problem.what, problem.got, problem.need, problem.try_))
    assert type(model[0]) is nn.Linear
    convert(model, Policy("bf16_mixed", device_type="cpu", strict=True))


def test_decoder_says_which_fp32_ops_it_cannot_honour():
    report = convert(
        decoder(), Policy("bf16_mixed", fp32_ops=("softmax", "rms_norm", "gelu")), kernels=KERNELS
    ).precision_report
    assert len(report.unmatched) == 1
    assert '"gelu"' in report.unmatched[0]


def test_table_has_a_row_and_a_reason_for_every_part(tmp_path):
    model = decoder(num_experts=4)
    table = explain(model, "hybrid")
    named = {row.fqn for row in table}
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert owners <= named | {"model.embed_tokens"}
    assert all(row.reason for row in table)
    assert "model.layers.*.self_attn.q_proj  x2" in str(table)
    assert table.to_json()[0]["fqn"] == "model.embed_tokens"
    assert type(model.blocks[0].self_attn.q_proj) is nn.Linear


def test_needs_loss_scaling():
    assert not convert(nn.Linear(2, 2), "bf16_mixed").precision_report.needs_loss_scaling
    assert convert(nn.Linear(2, 2), "pure_fp16").precision_report.needs_loss_scaling
    assert convert(nn.Linear(2, 2), Policy("fp32", (Rule(compute="fp16"),))).precision_report.needs_loss_scaling


# ---- CUDA decisions, made without a GPU ----


def switches(model: nn.Module, policy: Policy) -> list[str]:
    """What the report says about torch's process-wide switches."""
    from tilewright.precision.assign.conversion_plan import decide_all

    return list(decide_all(model, policy).report.notes)


def test_cuda_tf32_uses_the_process_wide_switch_and_says_so():
    notes = switches(SmallResNet(), Policy("tf32", device_type="cuda"))
    assert len(notes) == 1
    assert "TF32" in notes[0]


def test_cuda_tf32_beside_fp32_is_emulated_and_says_so():
    policy = Policy("tf32", (Rule("classifier", compute="fp32"),), device_type="cuda")
    notes = switches(SmallResNet(), policy)
    assert "FP32" in notes[0]
    assert "emulated" in notes[1]
    assert "emulated" in explain(SmallResNet(), policy)[0].reason


@pytest.fixture
def _switches_restored():
    """torch's switches are those of the whole process."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("_switches_restored")
def test_cuda_switches_are_set_and_evaluation_puts_them_back():
    model = SmallResNet()
    convert(model, Policy("tf32", device_type="cuda"))
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    assert not model.conv.round_tf32
    with evaluating(model):
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    set_mode(model, "bf16_mixed")
    with evaluating(model):
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"


def test_cuda_bf16_leaves_the_switch_alone():
    assert switches(SmallResNet(), Policy("bf16_mixed", device_type="cuda")) == []


def test_copies_are_converted_models_of_their_own():
    model = decoder()
    convert(model, "bf16_mixed", kernels=KERNELS)
    twin = copy.deepcopy(model)
    set_mode(model, "tf32")
    assert twin.blocks[0].mlp.up_proj.compute_dtype == torch.bfloat16
    assert twin.precision_report.policy.mode == "bf16_mixed"
