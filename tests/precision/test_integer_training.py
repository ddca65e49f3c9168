"""Rules that train for integers, against plain PyTorch on values that were rounded beforehand."""

import pytest
import torch
from torch.nn import functional as F

from tests.models.shapes import KERNELS
from tilewright.core.errors import ConfigError
from tilewright.formats.integer import INT4, quantize_integer, quantize_pairs
from tilewright.formats.scaling import Tile
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.precision.convert import convert, evaluating, explain, set_mode
from tilewright.precision.float8.audit import Audit
from tilewright.precision.integer.compute_formats import COMPUTE_FORMATS
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.rules import Rule


def policy(*rules, mode="fp32"):
    return Policy(mode, rules, device_type="cpu")


def decoder(**changes):
    torch.manual_seed(3)
    values = {"vocab_size": 96, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    model = Decoder(DecoderConfig(**values | {"ffn_dim": 96, "tie_embeddings": True} | changes), KERNELS)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1) if param.ndim > 1 else torch.nn.init.normal_(param, mean=1, std=0.1)
    return model


def batch():
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, 96, (2, 16), generator=draw) for name in ("input_ids", "labels")}


def by_hand(weight, name):
    """The rounded weight from definitions alone: FP64 division, FP16 scales for groups."""
    rows, width = weight.shape
    if name == "int8":
        pairs = torch.maximum(weight.abs(), (weight[:, ::2] + weight[:, 1::2]).abs().repeat_interleave(2, 1))
        scale = (pairs.amax(1, keepdim=True) / 127).double()
        return ((weight.double() / scale).round().clamp(-127, 127) * scale).float()
    groups = weight.view(rows, width // 32, 32)
    scale = torch.maximum(groups.amax(2) / 7, -groups.amin(2) / 8).half().double().unsqueeze(2)
    return ((groups.double() / scale).round().clamp(-8, 7) * scale).float().view(rows, width)


@pytest.mark.parametrize("name", ["int8", "int4", "int4_a8"])
@pytest.mark.support("integers", "one")
def test_layer_multiplies_rounded_values_and_passes_gradients_straight_through(name):
    torch.manual_seed(0)
    layer = convert(torch.nn.Sequential(torch.nn.Linear(64, 48)), policy(Rule(compute=name)))[0]
    x = torch.randn(5, 64, requires_grad=True)
    out = layer(x)
    weight = by_hand(layer.weight.detach(), name).requires_grad_()
    seen = x.detach()
    if name != "int4":
        scale = seen.abs().amax(1, keepdim=True) / 127
        seen = (seen / scale).round() * scale
    seen.requires_grad_()
    expected = F.linear(seen, weight, layer.bias.detach())
    # bound: sums of 64 products in FP32 in another order, values below 4
    assert (out - expected).abs().max() < 1e-5
    expected.square().sum().backward()
    out.square().sum().backward()
    assert (layer.weight.grad - weight.grad).abs().max() < 1e-3 * weight.grad.abs().max()
    assert (x.grad - seen.grad).abs().max() < 1e-3 * seen.grad.abs().max()


def test_int8_is_the_format_of_exports_and_int4_has_scales_that_fp16_holds():
    torch.manual_seed(0)
    weight = torch.randn(7, 96)
    assert torch.equal(COMPUTE_FORMATS["int8"].quantize(weight).codes, quantize_pairs(weight).codes)
    found = COMPUTE_FORMATS["int4"].quantize(weight)
    assert torch.equal(found.scale, found.scale.half().float())
    assert (found.scale / quantize_integer(weight, INT4, Tile(1, 32)).scale - 1).abs().max() <= 2**-11
    assert found.codes.min() >= -8
    assert found.codes.max() <= 7
    small = COMPUTE_FORMATS["int4"].quantize(weight * 1e-6)  # scales below FP16's normal numbers: steps of 2^-24
    assert torch.equal(small.scale, small.scale.half().float())
    assert (small.dequantize() - weight * 1e-6).abs().max() <= 0.51 * (weight.abs().max() * 1e-6 / 7 + 2.0**-24)
    tiny = COMPUTE_FORMATS["int4"].quantize(weight * 1e-9)  # below what FP16 holds
    assert not tiny.codes.any()
    assert torch.isfinite(tiny.scale).all()


def test_embedding_and_head_of_one_weight_are_one_decision():
    rows = {row.fqn: row for row in explain(decoder(), policy(Rule(op="head", compute="int8")))}
    assert rows["model.embed_tokens"].compute == rows["lm_head"].compute == "int8"
    assert "one weight with lm_head" in rows["model.embed_tokens"].reason
    both = policy(Rule(op="embedding", compute="int8"), Rule(op="head", compute="int4"))
    assert {row.compute for row in explain(decoder(), both) if row.op in ("embedding", "head")} == {"int4"}
    apart = {row.fqn: row.compute for row in explain(decoder(tie_embeddings=False), both)}
    assert (apart["model.embed_tokens"], apart["lm_head"]) == ("int8", "int4")


def test_loss_and_logits_of_a_model_see_the_same_rounded_head():
    """The loss takes the head's weight and not its forward."""
    model = convert(decoder(), policy(Rule(compute="int4_a8")))
    given = batch()
    expected = F.cross_entropy(model(given["input_ids"]).flatten(0, 1), given["labels"].flatten(), reduction="sum")
    plain = decoder()
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) or name == "model.embed_tokens":
            module.weight.data = by_hand(model.get_submodule(name).weight.detach(), "int4")
    unrounded = convert(decoder(), "fp32").loss(given).loss_sum
    assert abs(float(model.loss(given).loss_sum.detach() - expected.detach())) < 1e-3
    assert abs(float(unrounded - expected)) > 0.1
    weights_only = convert(decoder(), policy(Rule(compute="int4"))).loss(given).loss_sum
    assert abs(float(weights_only - plain.loss(given).loss_sum)) < 1e-3


def test_evaluation_rounds_too_and_rules_that_win_over_integers_win_there():
    rules = Rule(compute="int4"), Rule("*.o_proj", compute="bf16")
    model, given = convert(decoder(), policy(*rules, mode="bf16_mixed")), batch()
    wide = convert(decoder(), policy(Rule(compute="int4"), Rule("*.o_proj", compute="fp32")))
    with evaluating(model):
        inside = float(model.loss(given).loss_sum)
    assert inside == float(wide.loss(given).loss_sum)
    set_mode(model, Policy("bf16_mixed", device_type="cpu"))
    assert not any("rounded" in repr(module) for module in model.modules() if isinstance(module, torch.nn.Linear))


@pytest.mark.slow
def test_compiled_layers_round_as_eager_ones_do():
    """A compiler that drops a cast to FP16 and back would give other codes."""
    given = batch()
    eager, compiled = (convert(decoder(), policy(Rule(compute="int4_a8"))) for _ in range(2))
    compiled.compile_blocks()
    losses = [model.loss(given).loss_sum for model in (eager, compiled)]
    for loss in losses:
        loss.backward()
    assert abs(float(losses[0] - losses[1])) < 1e-3
    # bound: inputs near a tie may round to the neighbouring code where a sum has another order
    for (name, one), two in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert (one.grad - two.grad).norm() < 2e-2 * one.grad.norm(), name


def test_what_cannot_be_rounded_says_so():
    thin = torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.LayerNorm(8))
    row = explain(thin, policy(Rule(compute="int4")))[0]
    assert row.fallback
    assert row.compute == "fp32"
    assert "no multiple of its group of 32" in row.reason
    with pytest.raises(ConfigError, match=r"cannot compute in anything but FP32"):
        Rule(op="norm", compute="int4")
    with pytest.raises(ConfigError, match="no weight that can be rounded"):
        Rule(op="conv", compute="int8")
    with pytest.raises(ConfigError, match="Single matmuls"):
        Rule(compute="int8", dgrad="bf16")


def test_audit_names_the_format_and_the_kernel_that_multiplies():
    model = convert(decoder(), policy(Rule(op="linear", compute="int8"), mode="bf16_mixed"))
    rows = {row.layer: row for row in Audit(model).rows()}
    assert rows["model.layers.0.mlp.up_proj"].format == "int8"
    assert not rows["model.layers.0.mlp.up_proj"].fallback
