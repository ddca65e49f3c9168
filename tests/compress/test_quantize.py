"""`quantize` of whole models: GQA, MLA, experts, Hugging Face; tied weights, static activations, bad input."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.cover import some
from tests.models import shapes, test_hf_models
from tilewright.compress.quantize.quantize import quantize, total_bytes
from tilewright.compress.quantize.spec import QuantSpec
from tilewright.core.errors import ConfigError, NumericsError
from tilewright.formats.integer import INT8, quantize_integer
from tilewright.formats.scaling import Tile

OURS, THEIRS = ["gqa", "tied", "mla", "mla_q_rank", "gqa_moe", "deepseek"], ["llama", "qwen3", "gemma2", "bert"]
BATCHES = [shapes.make_batch(rows=4, positions=24, seed=seed) for seed in range(2)]
SPECS = {
    "int8": QuantSpec(),
    "dynamic": QuantSpec(activations="dynamic"),
    "static": QuantSpec(activations="static"),
    "rtn": QuantSpec(bits=4, group=16),
    "affine": QuantSpec(bits=4, group=16, symmetric=False),
    "gptq": QuantSpec(bits=4, group=16, method="gptq"),
    "awq": QuantSpec(bits=4, group=16, method="awq"),
}


def make(name):
    model = shapes.make_decoder(name) if name in OURS else test_hf_models.make(name)
    return model.eval()


def loss(model, batches=BATCHES):
    with torch.no_grad():
        return sum(float(model.loss(batch).loss_sum) for batch in batches)


PAIRS = [(name, spec) for name in ("gqa", "deepseek") for spec in SPECS]
PAIRS += [(name, spec) for name in (*OURS[1:-1], *THEIRS) for spec in ("dynamic", "gptq", "awq")]


ONE_EACH = [(name, ("dynamic", "gptq", "awq")[turn % 3]) for turn, (name, _) in enumerate(PAIRS[2 * len(SPECS) :: 3])]
"""By default each further model is rounded by one method, in turn."""


@pytest.mark.parametrize(("name", "spec"), some(PAIRS, *PAIRS[: 2 * len(SPECS)], *ONE_EACH))
def test_every_model_by_every_method(name, spec):
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = quantize(model, SPECS[spec], BATCHES)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model is left alone"
    parameters = dict(result.model.named_parameters())
    for key, weight in result.weights.items():
        assert torch.equal(weight.dequantize().view(parameters[key].shape), parameters[key]), key
    linears = [key for key, part in model.named_modules() if isinstance(part, nn.Linear)]
    kept = {key.removesuffix(".weight") for key in result.left}
    known = {key.removesuffix(".weight") for key in result.weights}
    tied = {key for key, part in model.named_modules() if isinstance(part, nn.Linear) and f"{key}.weight" not in before}
    same = {id(parameters[f"{key}.weight"]) for key in known}
    for key in set(linears) - known - kept - tied:
        assert id(result.model.get_submodule(key).weight) in same, f"{key} is neither quantised nor left with a reason"
    assert len(result.report) == len(result.weights)
    assert all(row.sqnr_db > (30 if "int8" in row.format else 8) for row in result.report), result.report
    assert result.nbytes < 0.6 * total_bytes(model)
    assert abs(loss(result.model) / loss(model) - 1) < (0.02 if SPECS[spec].bits == 8 else 0.25)
    assert not result.notes or name in ("gqa_moe", "deepseek", "gemma2", "bert"), result.notes


@pytest.mark.parametrize("name", ["gqa", "mla_q_rank", "llama", "qwen3"])
def test_scaled_models_are_the_same_before_rounding(name):
    """Eight bits of the scaled weights against the unscaled: what differs is rounding."""
    model = make(name)
    result = quantize(model, QuantSpec(method="awq"), BATCHES)
    assert {row.method for row in result.report} >= {"awq"}
    assert abs(loss(result.model) / loss(model) - 1) < 0.01
    changed = [key for key, value in result.model.named_parameters() if value.ndim == 1 and "norm" in key.lower()]
    before = dict(model.named_parameters())
    now = dict(result.model.named_parameters())
    assert any(not torch.equal(now[key], before[key]) for key in changed), "a norm took up a scale"


def test_a_scaling_that_another_reader_would_see_is_undone():
    """BERT's norms make the residual stream; plain rounding instead, and a note."""
    model = make("bert")
    result = quantize(model, QuantSpec(bits=4, group=16, method="awq"), BATCHES)
    assert result.notes
    assert all("read by something else" in note for note in result.notes)
    before = dict(model.named_parameters())
    norms = [key for key in before if key.endswith("LayerNorm.weight") and "encoder.layer.1.output" not in key]
    assert len(norms) > 3  # the last norm has one reader, and may be scaled
    assert all(torch.equal(result.model.get_parameter(key), before[key]) for key in norms)


def test_tied_weights_are_one():
    model = make("tied")
    result = quantize(model, QuantSpec())
    assert "model.embed_tokens.weight" in result.weights
    assert "lm_head.weight" not in result.weights
    assert result.model.lm_head.weight is result.model.model.embed_tokens.weight
    with pytest.raises(ConfigError, match="Tied embedding and head"):
        quantize(model, QuantSpec(head_bits=4))
    untied = quantize(make("gqa"), QuantSpec(embedding_bits=0, head_bits=4, group=16))
    assert untied.weights["lm_head.weight"].spec.bits == 4
    assert "model.embed_tokens.weight" in untied.left


def test_a_row_of_a_weight_is_what_the_format_says():
    model = make("gqa")
    result = quantize(model, QuantSpec())
    name = "model.layers.0.mlp.up_proj.weight"
    want = quantize_integer(model.get_parameter(name), INT8, Tile(1, 0))
    assert torch.equal(result.weights[name].codes, want.codes)


def test_groups_that_do_not_divide_end_with_a_shorter_one():
    result = quantize(make("gqa"), QuantSpec(bits=4, group=40))
    weight = result.weights["model.layers.0.self_attn.q_proj.weight"]
    assert weight.shape[1] == 64
    assert weight.scale.shape[1] == 2


def test_static_scales_cover_the_calibration_text():
    model = make("llama")
    result = quantize(model, QuantSpec(activations="static"), BATCHES)
    ranges = {}

    def look(name):
        return lambda module, args: ranges.setdefault(name, []).append((args[0].min(), args[0].max()))

    plain = copy.deepcopy(model)
    handles = [plain.get_submodule(name).register_forward_pre_hook(look(name)) for name in result.activations]
    loss(plain)
    for handle in handles:
        handle.remove()
    first = next(name for name in result.activations if "layers.0.self_attn.q_proj" in name)
    scale, point = result.activations[first]
    low, high = min(low for low, _ in ranges[first]), max(high for _, high in ranges[first])
    assert (-128 - point) * scale <= low + scale
    assert high - scale <= (127 - point) * scale
    assert scale <= float(high - low) / 255 * 1.01


def test_logits_by_gptq_are_nearer_than_by_rounding():
    """On the text that it was calibrated with."""
    model = make("gqa")
    ids, error = BATCHES[0]["input_ids"], {}
    with torch.no_grad():
        exact = model(ids)
        for method in ("rtn", "gptq"):
            rounded = quantize(model, QuantSpec(bits=4, group=16, method=method), BATCHES).model
            error[method] = float((rounded(ids) - exact).square().mean())
    assert error["gptq"] < error["rtn"], error


# ---- bad input ----


def test_weights_that_are_not_finite_are_named():
    model = make("gqa")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = math.nan
        model.model.norm.weight[0] = math.inf
    with pytest.raises(NumericsError, match="not finite") as error:
        quantize(model, QuantSpec())
    assert [p.where for p in error.value.problems] == ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]


def test_rows_of_zeros_stay_zero():
    model = make("gqa")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5] = 0
    for spec in ("int8", "gptq", "awq"):
        weight = quantize(model, SPECS[spec], BATCHES).model.model.layers[0].mlp.up_proj.weight
        assert (weight[5] == 0).all()
        assert weight.isfinite().all()


@pytest.mark.parametrize("spec", ["gptq", "awq", "static"])
def test_no_calibration_text(spec):
    with pytest.raises(ConfigError, match="calibration text"):
        quantize(make("gqa"), SPECS[spec])


@pytest.mark.parametrize(
    "arguments",
    [{"bits": 9}, {"group": -1}, {"method": "hqq"}, {"activations": "int4"}, {"embedding_bits": 3}, {"head_bits": 16}],
    ids=str,
)
def test_what_is_no_format(arguments):
    with pytest.raises(ConfigError) as error:
        QuantSpec(**arguments)
    (problem,) = error.value.problems
    assert all((problem.what, problem.got, problem.need, problem.try_, problem.where))
