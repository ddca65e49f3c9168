"""A number format that the package has never heard of, from its codes to a trained model, a plan and a report: nothing
here changes a file of the package, so nothing there names the formats that it can do."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.cover import covering
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.formats.quant_error import sqnr_db
from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import MX_SCALE, NVFP4_SCALE, ScaleSpec, Tile
from tilewright.formats.spec import E2M1, E4M3, E5M2, FloatSpec
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW, OperandFormat
from tilewright.models.build import build_model, init_weights
from tilewright.ops.kernels import Kernels
from tilewright.planner.model.gemms import LinearGemm, matmuls_of
from tilewright.planner.model.operand_bytes import OperandBytes
from tilewright.precision.assign.conversion_plan import decide_all
from tilewright.precision.convert import convert
from tilewright.precision.float8.audit import Audit
from tilewright.precision.float8.experts import ExpertRunner
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.policy.gemm_formats import FP8_TILE, GemmFormat, Gemms, Operands, of_text, to_text
from tilewright.precision.policy.policy import Policy

MACHINE = detect_machine("cpu")
KERNELS = Kernels(MACHINE, compile=False)
E3M4 = FloatSpec("e3m4", 8, 3, 4, torch.uint8)
E2M3 = FloatSpec("e2m3", 6, 2, 3, torch.uint8, has_infinity=False, has_nan=False)
ROW64, BLOCK64 = ScaleSpec(Tile(1, 64)), ScaleSpec(Tile(64, 64))
EXACT = ScaleSpec(Tile(1, 48), torch.bfloat16, "exact")


def same(form):
    return Operands(form, form, form)


NEW = (
    GemmFormat(
        "e3m4_1x64", Operands(OperandFormat(E3M4, ROW64), OperandFormat(E3M4, BLOCK64), OperandFormat(E5M2, ROW64))
    ),
    GemmFormat("mx_e4m3", same(OperandFormat(E4M3, MX_SCALE))),
    GemmFormat("mx_e5m2", Operands(OperandFormat(E4M3, MX_SCALE), FP8_BLOCK, OperandFormat(E5M2, MX_SCALE))),
    GemmFormat("nv_e2m1", same(OperandFormat(E2M1, NVFP4_SCALE))),
    GemmFormat("e2m3_bf16", same(OperandFormat(E2M3, EXACT))),
    GemmFormat(
        "floor", Operands(FP8_ROW, FP8_BLOCK, OperandFormat(E4M3, ScaleSpec(Tile(1, 128), torch.float32, "floor")))
    ),
    GemmFormat("exact", same(OperandFormat(E4M3, ScaleSpec(Tile(0, 0), torch.float32, "exact")))),
)
each = pytest.mark.parametrize("form", NEW, ids=str)


def layer_in(gemms, features=(200, 72), **how):
    torch.manual_seed(0)
    layer = Float8Linear(*features)
    layer.kernels, layer.output_dtype = KERNELS, torch.float32
    layer.configure(gemms, power_of_two=True, **how)
    return layer


def values(x, form):
    return quantize(x, form).dequantize().double()


def wanted(layer, x, dy, form):
    """Forward, input gradient and weight gradient in FP64 of the operands that the format says."""
    forms, weight = form.operands, layer.weight.detach()
    return (
        values(x, forms.input) @ values(weight, forms.weight).T + layer.bias.detach().double(),
        values(dy, forms.gradient) @ values(weight.T, forms.weight).T,  # along what is summed; the same of square tiles
        values(dy.T, forms.gradient) @ values(x.T, forms.input).T,
    )


@each
@pytest.mark.parametrize("keep", ["qdata", "value"])
@pytest.mark.parametrize("rows", [1, 130])
def test_a_layer_multiplies_what_the_format_says(form, keep, rows):
    layer = layer_in(Gemms.all(form), keep=keep)
    x, dy = torch.randn(rows, 200, requires_grad=True), torch.randn(rows, 72)
    out = layer(x)
    out.backward(dy)
    for ours, want in zip((out.detach(), x.grad, layer.weight.grad), wanted(layer, x.detach(), dy, form), strict=True):
        bound = (
            200 * 2.0**-23 if form.operands.input.element != E4M3 else 2.0**-8
        )  # BF16 results where kernels have them
        error = ((ours.double() - want).abs() / want.abs().max()).max().item()
        assert error <= bound, f"worst element off by {error:.2e} of the largest"
    assert layer.executed() == {gemm: {form.name: 1} for gemm in ("fprop", "dgrad", "wgrad")}


@each
def test_it_is_known_by_its_name(form):
    layer = layer_in(Gemms(form, form, Gemms.all("bf16").wgrad))
    assert f"gemms={form.name}/{form.name}/bf16" in repr(layer)
    assert of_text(to_text(NEW)) == NEW
    assert str(form.operands.weight).startswith(form.operands.weight.element.name)


@each
def test_its_weight_is_kept_and_planned_to_the_byte(form):
    model = nn.Sequential(layer_in(Gemms.all(form)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    QuantizedWeights(model, optimizer)
    store = model[0].weight_store
    planned = LinearGemm("0", 200, 72, 1.0, Gemms.all(form))
    assert store is not None
    assert planned.code_bytes == store.nbytes
    tiled = quantize(model[0].weight.detach(), form.operands.weight)
    assert form.operands.weight.bytes_of((72, 200)) == tiled.nbytes <= store.nbytes
    for _ in range(2):
        model(torch.randn(5, 200)).sum().backward()
        optimizer.step()
        kept, fresh = model[0].quantized_weight(), quantize(model[0].weight.detach(), form.operands.weight)
        assert torch.equal(kept.dequantize(), fresh.dequantize())
        assert model[0].weight_store is store
    eight_bit, wide = (
        OperandBytes.of([LinearGemm("0", 200, 72, 1.0, Gemms.all(name))], 100, MACHINE, True) for name in (form, "bf16")
    )
    tile = OperandBytes.of([LinearGemm("0", 200, 72, 1.0, Gemms.all("fp8_tile"))], 100, MACHINE, True)
    again = 0 if form.operands.weight.is_square else 5 * 200 * 72  # the weight, along its other dimension
    assert eight_bit == replace(tile, backward=tile.backward + again)
    assert wide == OperandBytes()


@each
def test_it_moves_to_16_bits_and_back_at_run_time(form):
    layer = layer_in(Gemms.all(form), keep="value")
    x, gemms = torch.randn(9, 200), layer.gemms
    before = layer(x)
    layer.set_gemms(Gemms.all("bf16"))
    assert not torch.equal(layer(x), before)
    layer.set_gemms(gemms)
    assert torch.equal(layer(x), before)
    assert layer.executed()["fprop"] == {form.name: 2, "bf16": 1}
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), before)


def test_a_layer_can_be_made_for_one_after_the_other():
    layer = layer_in(Gemms.all("fp8_tile"))
    x = torch.randn(9, 200)
    for form in (*NEW, Gemms.all("bf16").fprop, *reversed(NEW)):
        layer.configure(Gemms.all(form), power_of_two=True)
        assert torch.equal(layer(x), layer_in(Gemms.all(form))(x)), form
    assert layer.executed()["fprop"] == {NEW[0].name: 1, "bf16": 1}  # counted as long as it knows them


def test_a_format_of_the_caller_s_is_not_taken_for_one_of_a_recipe_that_has_its_name():
    named = replace(NEW[3], name="nvfp4")
    layer, ours = layer_in(Gemms.all(named), keep="value"), layer_in(Gemms.all(NEW[3]))
    x = torch.randn(9, 200)
    assert torch.equal(layer(x), ours(x))
    assert not torch.equal(layer(x), layer_in(Gemms.all("nvfp4"))(x))


def test_a_layer_that_was_not_made_for_it_refuses_it():
    layer = layer_in(Gemms.all("fp8_tile"), keep="value")
    for form in NEW:
        with pytest.raises(ConfigError, match="cannot change after conversion"):
            layer.set_gemms(Gemms.all(form))
    with pytest.raises(ConfigError, match="same kind of scale"):
        Gemms(NEW[0], NEW[1], NEW[0])


class PolicyOfNewFormat(Policy):
    """fp8_tile, but that it means another format."""

    def decide(self, fqn, kind, features=None):
        found = super().decide(fqn, kind, features)
        if found.gemms is None:
            return found
        forms = (FORM[0] if each == FP8_TILE else each for each in found.gemms.formats)
        gemms = Gemms(*forms)
        return type(found)(**vars(found) | {"gemms": gemms, "compute": str(gemms)})


FORM = [NEW[0]]


@pytest.mark.parametrize(("form", "num_experts"), covering(NEW, (0, 4), pairs=False), ids=str)
def test_a_whole_model_trains_in_it(form, num_experts, monkeypatch):
    monkeypatch.setitem(globals(), "FORM", [form])
    section = ModelSection(
        dim=128, num_layers=2, num_heads=2, num_experts=num_experts, expert_dim=72 if num_experts else 0
    )
    ids = torch.randint(0, 300, (3, 65), generator=torch.Generator().manual_seed(0))

    def step(policy):
        model = build_model(section, 300, KERNELS, "cpu")
        init_weights(model, 0)
        model = convert(model, policy, kernels=KERNELS).train()
        out = model.loss({"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()})
        (out.loss_sum / out.count).backward()
        return model, out.loss_sum.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    policy = PolicyOfNewFormat("fp8_tile", device_type="cpu")
    model, loss, grads = step(policy)
    _, wide_loss, wide_grads = step(Policy("bf16_mixed", device_type="cpu"))
    assert loss == pytest.approx(wide_loss, rel=0.02)
    assert loss != wide_loss
    assert sqnr_db(wide_grads, grads) > (2 if form.name == "nv_e2m1" else 10)
    if num_experts:
        runs_as_one = isinstance(model.blocks[1].mlp.expert_runner, ExpertRunner)
        forms = form.operands
        assert runs_as_one == (forms.input.in_rows and forms.gradient.in_rows)
    # A report, an audit and a plan name it.
    names = {name for row in model.precision_report.to_json()["rows"] for name in (row["gemms"] or {}).values()}
    assert form.name in names
    assert form.name in str(model.precision_report.rows)
    ran = {row.format: row for row in Audit(model).rows() if row.calls}
    assert form.name in ran
    assert "fp8_tile" not in ran
    if not form.operands.input.is_fp8:
        assert "decoded" in ran[form.name].fallback
    planned = {str(matmul.gemms) for matmul in matmuls_of(model, decide_all(model, policy))}
    assert any(form.name in name for name in planned)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_two_files_name_a_format_of_recipes(name):
    """Where its parts are, and the setting: what else wants it reads it there."""
    root = Path(tilewright.__file__).parent
    named = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if f'"{name}"' in path.read_text()}
    assert named == {"precision/policy/gemm_formats.py", "core/config/sections/precision.py"}
