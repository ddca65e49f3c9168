"""Decisions: modes, precedence of rules, and mistakes in a policy."""

from dataclasses import replace

import pytest

from tilewright.core.config.sections.precision import PrecisionRule, PrecisionSection
from tilewright.core.errors import ConfigError
from tilewright.precision.policy.gemm_formats import SCALED_FORMATS, Gemms
from tilewright.precision.policy.policy import MODES, Policy, Rule
from tilewright.precision.policy.rules import ALWAYS_FP32, KINDS

FORMATS_BY_MODE = {  # (matmul, embedding, storage) on CPU
    "fp32": ("fp32", "fp32", "fp32"),
    "tf32": ("tf32", "fp32", "fp32"),
    "bf16_mixed": ("bf16", "bf16", "fp32"),
    "hybrid": ("bf16", "fp32", "fp32"),
    "pure_fp16": ("fp16", "fp16", "fp16"),
    "fp8_tile": ("bf16", "bf16", "fp32"),  # and linear layers: see test_fp8_modes
    "fp8_hybrid": ("bf16", "bf16", "fp32"),
    "fp8_tensorwise": ("bf16", "bf16", "fp32"),
    "mxfp8": ("bf16", "bf16", "fp32"),
    "mxfp4": ("bf16", "bf16", "fp32"),
    "nvfp4": ("bf16", "bf16", "fp32"),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    policy = Policy(mode, device_type="cpu")
    matmul, embedding, storage = FORMATS_BY_MODE[mode]
    for kind in ("linear", "conv", "attention", "head"):
        assert policy.decide("a", kind).compute == (mode if kind == "linear" and policy.is_fp8 else matmul)
        assert policy.decide("a", kind).storage == storage
    assert policy.decide("a", "embedding").compute == embedding
    for kind in ALWAYS_FP32:
        decision = policy.decide("a", kind)
        assert (decision.compute, decision.storage) == ("fp32", "fp32")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*KINDS, "other"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_decision_has_a_reason(mode, kind, device):
    assert len(Policy(mode, device_type=device).decide("a.b", kind).reason) > 10


@pytest.mark.parametrize("mode", SCALED_FORMATS)
def test_fp8_modes(mode):
    policy = Policy(mode, device_type="cpu")
    assert policy.decide("layers.0.up_proj", "linear", (64, 64)).gemms == Gemms.all(mode)
    decoupled = policy.decide("layers.0.self_attn.o_proj", "linear", (64, 64))
    assert decoupled.compute == f"{mode}/bf16/bf16"
    assert "precision.bf16_grad_layers" in decoupled.reason
    assert replace(policy, bf16_grad_layers=()).decide("layers.0.self_attn.o_proj", "linear", (64, 64)).compute == mode


def test_recipe_and_library_decouple_the_same_layers():
    assert Policy.from_section(PrecisionSection(mode="fp8_tile"), "cpu") == Policy("fp8_tile", device_type="cpu")


def test_layers_too_small_to_gain_are_left_alone_on_a_gpu_with_the_number():
    policy = Policy("fp8_tile", device_type="cuda")
    small, large = policy.decide("a", "linear", (256, 256)), policy.decide("a", "linear", (4096, 4096))
    assert (small.compute, large.compute) == ("bf16", "fp8_tile")
    assert "0.67x" in small.reason
    assert replace(policy, fp8_min_gain=0.0).decide("a", "linear", (256, 256)).compute == "fp8_tile"
    assert Policy("fp8_tile", device_type="cpu").decide("a", "linear", (256, 256)).compute == "fp8_tile"
    forced = Policy("fp8_tile", (Rule("a", compute="fp8_tile"),), device_type="cuda")
    assert forced.decide("a", "linear", (256, 256)).compute == "fp8_tile"


@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile"])
@pytest.mark.parametrize(
    "rule", [*(Rule(op="head", compute=name) for name in SCALED_FORMATS), Rule(op="head", fprop="fp8_tile")]
)
def test_a_head_in_8_bits_gives_bf16(mode, rule):
    assert Policy(mode, (rule,), device_type="cpu").decide("lm_head", "head").output == "bf16"
    wide = Policy(mode, (rule, Rule(op="head", fprop="fp32")), device_type="cpu").decide("lm_head", "head")
    assert wide.output == "fp32"


def test_rules_that_give_a_kind():
    rule = Rule("*.gate", kind="router")
    assert str(rule) == 'match = "*.gate" kind = "router"'
    assert Policy("fp8_tile", (rule,), device_type="cpu").decide("a.gate", "linear", (64, 64)).rule is None
    for wrong in ({"op": "linear"}, {"compute": "bf16"}, {"wgrad": "bf16"}):
        with pytest.raises(ConfigError):
            Rule("*.gate", kind="router", **wrong)
    with pytest.raises(ConfigError, match="unknown value"):
        Rule("*.gate", kind="norm")
    assert Rule("*.gate", kind="linear", compute="fp8_tile").sets_formats


def test_rules_for_single_products():
    def gemms(mode, *rules, kind="linear"):
        return Policy(mode, rules, device_type="cpu").decide("a", kind).gemms

    assert gemms("bf16_mixed", Rule("a", wgrad="fp32")) == Gemms.of("bf16", "bf16", "fp32")
    assert gemms("fp8_tile", Rule("a", dgrad="bf16")) == Gemms.of("fp8_tile", "bf16", "fp8_tile")
    assert gemms("fp8_tile", Rule("a", dgrad="bf16"), Rule("a", fprop="bf16")) == Gemms.of("bf16", "bf16", "fp8_tile")
    assert gemms("fp8_tile", Rule("a", compute="bf16")) is None
    assert gemms("bf16_mixed", Rule("a", compute="fp8_hybrid", wgrad="bf16")) == Gemms.of(
        "fp8_hybrid", "fp8_hybrid", "bf16"
    )
    assert gemms("fp8_tile", Rule("*", wgrad="bf16"), kind="conv") is None
    assert gemms("bf16_mixed", Rule("*", op="head", compute="fp8_tile"), kind="head") == Gemms.all("fp8_tile")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda: Rule("a"), "names no format"),
        (lambda: Rule(op="conv", wgrad="bf16"), "linear layers only"),
        (lambda: Rule(op="embedding", compute="fp8_tile"), "linear layers only"),
        (lambda: Rule("a", wgrad="fp8_tiel"), "fp8_tile"),
        (lambda: Policy("hybrid", (Rule("a", wgrad="bf16"),), device_type="cuda").decide("a", "linear"), "fp16"),
    ],
)
def test_mistakes_in_rules_for_products(rule, message):
    with pytest.raises(ConfigError, match=message):
        rule()


def test_hybrid_depends_on_the_device_and_says_so():
    cuda, cpu = (Policy("hybrid", device_type=d).decide("a", "linear") for d in ("cuda", "cpu"))
    assert (cuda.compute, cpu.compute) == ("fp16", "bf16")
    assert "loss scaling" in cuda.reason
    assert "AMX" in cpu.reason


def test_later_rules_win_over_earlier_ones_and_over_fp32_ops():
    rules = (Rule("blocks.*", compute="fp16"), Rule("*.0.up", compute="bf16"))
    policy = Policy("fp32", rules, fp32_ops=("linear",), device_type="cpu")
    assert [policy.decide(name, "linear").compute for name in ("head", "blocks.1.up", "blocks.0.up")] == [
        "fp32",
        "fp16",
        "bf16",
    ]
    assert policy.decide("blocks.0.up", "linear").reason.startswith("rule 2")
    assert policy.decide("blocks.0.up", "linear").rule == 1


def test_rules_by_kind():
    policy = Policy(
        "bf16_mixed", (Rule(op="linear", compute="fp32"), Rule(op="head", compute="bf16")), device_type="cpu"
    )
    assert policy.decide("a", "linear").compute == "fp32"
    assert policy.decide("a", "head").compute == "bf16"
    assert policy.decide("a", "conv").compute == "bf16"


def test_a_linear_rule_means_the_head_too_but_not_the_router():
    policy = Policy("bf16_mixed", (Rule(op="linear", compute="tf32"),), device_type="cpu")
    assert policy.decide("a", "head").compute == "tf32"
    assert policy.decide("a", "router").compute == "fp32"


def test_exceptions_return_what_the_next_layer_expects():
    policy = Policy("bf16_mixed", (Rule("*.wide", compute="fp32"),), device_type="cpu")
    assert policy.decide("a.wide", "linear").output == "bf16"
    assert policy.decide("a.wide", "head").output == "fp32"


@pytest.mark.parametrize(
    ("op", "kind"), [("layer_norm", "norm"), ("embedding", "embedding"), ("attention", "attention"), ("conv", "conv")]
)
def test_fp32_ops_name_modules(op, kind):
    assert Policy("bf16_mixed", fp32_ops=(op,), device_type="cpu").decide("a", kind).compute == "fp32"


@pytest.mark.parametrize(
    ("make", "suggestion"),
    [
        (lambda: Policy("bf16_mixd"), "bf16_mixed"),
        (lambda: Policy(fp32_ops=("layernorm",)), "layer_norm"),
        (lambda: Policy(fp32_ops=("soft_max",)), "softmax"),
        (lambda: Rule(op="linaer"), "linear"),
        (lambda: Rule(compute="float16"), "fp16"),
    ],
)
def test_unknown_names_are_errors_with_a_suggestion(make, suggestion):
    with pytest.raises(ConfigError) as caught:
        make()
    assert suggestion in caught.value.problems[0].try_


@pytest.mark.parametrize("op", sorted(ALWAYS_FP32))
def test_what_is_always_fp32_cannot_be_ruled_otherwise(op):
    Rule(op=op, compute="fp32")
    with pytest.raises(ConfigError, match="cannot compute in anything but FP32"):
        Rule(op=op, compute="bf16")


def test_a_policy_without_a_device_cannot_decide():
    with pytest.raises(ConfigError, match="without a device"):
        Policy().decide("a", "linear")


def test_from_section_reads_every_field():
    section = PrecisionSection(
        mode="hybrid", rules=(PrecisionRule(match="x", op="linear", compute="fp16"),), fp32_ops=("softmax",)
    )
    assert Policy.from_section(section, "cuda") == Policy(
        "hybrid", (Rule("x", "linear", "fp16"),), ("softmax",), "cuda"
    )
    assert Policy.from_section(PrecisionSection(enabled=False, mode="hybrid"), "cpu").mode == "fp32"
    assert Policy.from_section(section, "cpu", parameters="bf16").decide("a", "linear").storage == "bf16"
    assert Policy.from_section(section, "cpu", parameters="bf16").decide("a", "norm").storage == "fp32"
