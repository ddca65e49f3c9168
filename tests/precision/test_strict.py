"""A strict policy refuses work that an FP8 mode would leave in another format unasked; the report says the shares."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.precision.test_fp8_cover import build
from tilewright.core.errors import HardwareError
from tilewright.core.hardware import detect_machine
from tilewright.models.base.output_layers import find_heads
from tilewright.precision.convert import convert, explain
from tilewright.precision.policy.policy import Policy, Rule


@pytest.fixture(autouse=True)
def a_machine_with_a_unit_for_fp8(monkeypatch):
    machine = replace(detect_machine("cpu"), capability=(9, 0))
    monkeypatch.setattr("tilewright.precision.assign.conversion_plan.detect_machine", lambda _: machine)


class Own(nn.Module):
    """A block that multiplies by matrices of its own, and one that only adds its table."""

    def __init__(self, width=64):
        super().__init__()
        self.plain = nn.Linear(width, width)
        self.up = nn.Module()
        self.low_rank = LowRank(width)
        self.stack = Stack(width)
        self.positions = Positions(width)

    def forward(self, x):
        return self.stack(self.low_rank(self.positions(self.plain(x))))


class LowRank(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, width)), nn.Parameter(torch.randn(width, 8))

    def forward(self, x):
        return x + x @ self.a.T @ self.b.T


class Stack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, width))

    def forward(self, x):
        return torch.bmm(x[None].expand(3, -1, -1), self.weight).sum(0)


class Positions(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Parameter(torch.randn(100, width))

    def forward(self, x):
        return F.gelu(x) + self.table[: len(x)]


def strict(model, *rules, mode="fp8_tile"):
    return convert(model, Policy(mode, rules, strict=True)).precision_report


@pytest.mark.parametrize("mode", ["fp8_tile", "fp8_hybrid", "fp8_tensorwise"])
def test_weights_in_code_of_its_own_are_refused_with_the_worst_first(mode):
    model = Own()
    with pytest.raises(HardwareError) as error:
        strict(model, mode=mode)
    (problem,) = error.value.problems
    assert problem.what.startswith("2 parts with 76.5 % of the matmul work: stack 70.6 %, low_rank 5.9 %")
    assert "positions" not in str(error.value)
    assert mode in problem.got
    assert type(model.plain) is nn.Linear, "nothing was changed"
    report = convert(model, mode).precision_report
    assert {row.fqn: row.compute for row in report.rows if row.fallback} == {"stack": "bf16", "low_rank": "bf16"}
    assert report.shares == pytest.approx({"bf16": 13 / 17, mode: 4 / 17})
    assert f"matmul work: 76.5 % bf16, 23.5 % {mode}" in str(report)
    assert report.to_json()["shares"] == report.shares
    assert f"2 parts with 76.5 % of the matmul work are not in {mode}: stack 70.6 %" in report.notes[0]


def test_a_rule_exempts_what_it_names():
    report = strict(Own(), Rule("stack", compute="bf16"), Rule("low_rank", compute="fp32"))
    assert not [row for row in report.rows if row.fallback]
    with pytest.raises(HardwareError, match=r"1 part with .* low_rank"):
        strict(Own(), Rule("stack", compute="bf16"))


def test_torchs_attention_module_is_refused_and_says_why():
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    rows = {row.fqn: row for row in explain(model, "fp8_tile")}
    assert rows["self_attn"].fallback
    assert rows["self_attn"].work == 2 * 4 * 64 * 64
    assert "fused attention module" in rows["self_attn"].reason
    assert rows["linear1"].compute == "fp8_tile"
    with pytest.raises(HardwareError, match=r"1 part with 50\.0 % of the matmul work: self_attn"):
        strict(model)
    strict(model, Rule(op="attention", compute="bf16"))
    with pytest.raises(HardwareError, match="rnn"):
        strict(nn.ModuleDict({"rnn": nn.LSTM(8, 8), "up": nn.Linear(8, 8)}))


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_models_whose_work_is_in_fp8_are_accepted(name):
    report = strict(build(name))
    assert not [row for row in report.rows if row.fallback]
    assert report.shares["fp8_tile"] > 0.75, report.shares


@pytest.mark.parametrize(
    "family", ["ViTConfig", "BertConfig", "MambaConfig", "SwinConfig", "LlamaConfig", "BeitConfig"]
)
def test_tables_and_decay_rates_are_not_taken_for_work(family):
    import transformers

    small = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 90,
        "num_attention_heads": 4,
    }
    config = getattr(transformers, family)()
    for key, value in small.items():
        if type(getattr(config, key, None)) is int:
            setattr(config, key, value)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    table = explain(model, Policy("fp8_tile", device_type="cpu"))
    assert not [row.fqn for row in table if row.fallback]


def test_the_share_of_experts_is_that_of_their_tokens():
    report = convert(build("mixtral"), "fp8_tile").precision_report
    rows = {row.fqn: row for row in report.rows}
    experts = rows["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts.work == 2 * 320 * 128 * 2  # two of six experts for each token
    assert rows["model.layers.0.mlp.gate"].work == 2 * 6 * 128
    assert not report.notes
    unknown = Own()
    unknown.plain = nn.ModuleDict(
        {"gate": nn.Linear(64, 4), "experts": nn.ModuleList(nn.Linear(64, 8) for _ in range(4))}
    )
    assert all(row.work for row in convert(unknown, "bf16_mixed").precision_report.rows if row.op == "linear")


def test_how_many_experts_a_token_has_may_not_be_known():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(64, 4)
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            return self.gate(x).topk(CHOSEN)

    report = convert(Mixture(), "fp8_tile").precision_report
    assert "how many experts a token has is not known: 4 weights" in report.notes[0]
    assert "note: how many experts" in str(report)
    known = Mixture()
    known.top_k = 2
    report = convert(known, "fp8_tile").precision_report
    assert not report.notes
    assert {row.fqn: row.work for row in report.rows}["experts.3"] == 2 * 64 * 64 / 2


CHOSEN = 2


def test_a_classifier_is_a_head_wherever_it_stands():
    import transformers as hf

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    vit = hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=32, patch_size=8, num_labels=2))
    rows = {row.fqn: row for row in convert(vit, "fp8_tile").precision_report.rows}
    assert (rows["classifier"].op, rows["classifier"].compute) == ("head", "bf16")
    config = hf.LlamaConfig(**small, vocab_size=90, num_labels=2)
    for kind, name in ((hf.LlamaForSequenceClassification, "score"), (hf.LlamaForCausalLM, "lm_head")):
        model = kind(config)
        assert find_heads(model) == [model.get_submodule(name)]
    roberta = hf.RobertaForSequenceClassification(hf.RobertaConfig(**small, vocab_size=90))
    assert find_heads(roberta) == [roberta.classifier.out_proj]
    blocks = nn.ModuleDict(
        {"blocks": nn.ModuleList(nn.Linear(16, 16) for _ in range(10)), "classes": nn.Linear(16, 10)}
    )
    assert {row.fqn: row.op for row in explain(blocks, "fp8_tile")}["classes"] == "head"


class Doubled(nn.Module):
    """A parametrization with a linear layer of its own."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(10, 10)

    def forward(self, weight):
        return 2 * weight + 0 * self.mix.weight.sum()


PARAMETRIZED = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "of the bias": lambda layer: nn.utils.parametrize.register_parametrization(layer, "bias", nn.Identity()),
    "own layers": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Doubled()),
    "several": lambda layer: [
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled()) for _ in range(2)
    ],
    "weight norm of old": nn.utils.weight_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_a_parametrized_output_layer_is_the_head(kind):
    blocks = nn.ModuleDict(
        {"blocks": nn.ModuleList(nn.Linear(16, 16) for _ in range(10)), "classes": nn.Linear(16, 10)}
    )
    PARAMETRIZED[kind](blocks["classes"])
    assert find_heads(blocks) == [blocks["classes"]]
    for block in blocks["blocks"]:
        PARAMETRIZED[kind](block)
    assert find_heads(blocks) == [blocks["classes"]], "also where the layers of the stack are parametrized"


@pytest.mark.parametrize("kind", ["router", "head", "linear"])
def test_a_rule_names_and_unnames(kind):
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    report = convert(model, Policy("fp8_tile", (Rule("a", kind=kind),))).precision_report
    rows = {row.fqn: row for row in report.rows}
    want = {"router": "fp32", "head": "bf16", "linear": "fp8_tile"}[kind]
    assert (rows["a"].op, rows["a"].compute) == (kind, want)
    assert rows["b"].compute == "fp8_tile"
    assert not report.unmatched


def test_rules_name_and_unname_routers_of_transformers():
    model = build("mixtral")
    rows = {row.fqn: row for row in explain(model, "fp8_tile")}
    assert rows["model.layers.0.mlp.gate"].op == "router"
    policy = Policy("fp8_tile", (Rule("*.mlp.gate", kind="linear"), Rule("*.o_proj", kind="router")))
    rows = {row.fqn: row for row in explain(model, policy)}
    assert (rows["model.layers.0.mlp.gate"].op, rows["model.layers.0.mlp.gate"].compute) == ("other", "bf16")
    assert (rows["model.layers.1.self_attn.o_proj"].op, rows["model.layers.1.self_attn.o_proj"].compute) == (
        "router",
        "fp32",
    )


def test_what_transformers_keeps_in_fp32_stays_there():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model._keep_in_fp32_modules_strict = {"1.weight"}
    rows = {row.fqn: row for row in explain(model, "fp8_tile")}
    assert (rows["0"].compute, rows["1"].compute) == ("fp8_tile", "fp32")
    assert '_keep_in_fp32_modules_strict names "1.weight"' in rows["1"].reason
    forced = {row.fqn: row for row in explain(model, Policy("fp8_tile", (Rule("1", compute="fp8_tile"),)))}
    assert forced["1"].compute == "fp8_tile"
