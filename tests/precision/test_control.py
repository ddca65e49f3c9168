"""The controller at work on a model: formats, bad steps, plain loops, and what stays as it was."""

import json

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.models.shapes import make_batch, make_decoder
from tilewright.core.config.sections.precision import PrecisionSection
from tilewright.core.errors import ConfigError
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.precision.convert import convert, evaluating
from tilewright.precision.float8.linear import float8_layers
from tilewright.precision.policy.gemm_formats import GEMM_NAMES, Gemms
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.schedule import FormatSchedule

FREE = ControllerSettings(budget=1.0, cooldown=2, patience=1, interval=4, recalibrate_interval=1000)
EIGHT = Policy("fp8_tile", keep="value", bf16_grad_layers=())


def two_layers(policy=EIGHT):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    convert(model, policy)
    return model


def plain_loss(model, x):
    return lambda: model(x).float().square().mean()


def gemms(model):
    return {name: str(layer.gemms) for name, layer in float8_layers(model).items()}


def outliers(rows=128):
    """Rows with one element so large that the rest of its tile is flushed to zero."""
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 2.0**22
    return x


def test_a_product_that_loses_its_operands_leaves_8_bits_and_the_others_stay():
    model = two_layers()
    with PrecisionController(model, FREE) as control:
        control.run(plain_loss(model, outliers()))
        found = control.controller.formats()
    assert found["0", "fprop"] == "bf16"
    assert found["2", "dgrad"] == "fp8_tile"
    kinds = [row["kind"] for row in control.take_rows()]
    assert kinds[0] == "sample"
    assert "move" in kinds
    assert gemms(model) == {"0": "fp8_tile", "2": "fp8_tile"}, "the formats of before, outside"


def test_calm_rows_move_nothing():
    model = two_layers()
    x = torch.randn(128, 128)
    with PrecisionController(model, FREE) as control:
        assert all(control.run(plain_loss(model, x)).apply for _ in range(10))
    assert control.controller.share_above_8bit == 0.0
    assert [row["step"] for row in control.take_rows()] == [1, 5, 9]


def test_rows_are_json():
    model = two_layers()
    control = PrecisionController(model, FREE)
    x = outliers()
    x[3, 4] = float("nan")
    control.run(plain_loss(model, x))
    rows = control.take_rows()
    assert json.loads(json.dumps(rows, allow_nan=True)) == json.loads(json.dumps(rows))
    assert control.take_rows() == []


def test_a_bad_step_is_computed_again_in_bf16_and_the_formats_come_back():
    model = two_layers()
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    with PrecisionController(model, ControllerSettings(budget=1.0, interval=1000)) as control:
        for _ in range(20):
            assert control.run(plain_loss(model, x)).redone is None
        seen = []

        def loss():
            seen.append(gemms(model)["0"])
            value = plain_loss(model, x)()
            return value * (1000.0 if seen[-1] == "fp8_tile" else 1.0)

        outcome = control.run(loss)
        good = plain_loss(model, x)().item()
    assert seen[:2] == ["fp8_tile", "bf16"]
    assert outcome.apply
    assert "loss" in outcome.redone
    assert outcome.loss == pytest.approx(good, rel=0.1)
    moved = [row for row in control.take_rows() if row["kind"] == "move"]
    assert moved, "what a wider format mends is looked at, and something moves"


def test_a_step_that_is_not_finite_in_any_format_is_not_applied():
    model = two_layers()
    control = PrecisionController(model, FREE)
    x = torch.full((64, 128), float("nan"))
    outcome = control.run(plain_loss(model, x))
    assert not outcome.apply
    assert "not finite" in outcome.skipped
    assert gemms(model).keys() == {"0", "2"}


def test_the_gradients_of_a_redone_step_are_those_of_bf16_alone():
    model, wide = two_layers(), two_layers()
    for layer in float8_layers(wide).values():
        layer.set_gemms(Gemms.all("bf16"))
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    control = PrecisionController(model, ControllerSettings(budget=1.0, interval=1000))
    for _ in range(20):
        control.run(plain_loss(model, x))
    calls = []

    def loss():
        calls.append(1)
        return plain_loss(model, x)() * (float("nan") if len(calls) == 1 else 1.0)

    model.zero_grad()
    verdict = control.run_guarded(lambda: _backward(model, loss))
    _backward(wide, plain_loss(wide, x))
    assert verdict[1] is None
    for ours, theirs in zip(model.parameters(), wide.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def _backward(model, loss):
    value = loss()
    value.backward()
    norms = [param.grad.norm() for param in model.parameters()]
    return value.item(), torch.stack(norms).norm().item()


def test_a_schedule_alone_moves_products_and_nothing_is_looked_at():
    model = two_layers()
    schedule = FormatSchedule((1, 2, 3), end=5, after="fprop")
    control = PrecisionController(model, None, schedule)
    seen = []
    for step in range(6):
        control.enter(step)
        assert not control.due(step)
        seen.append(gemms(model)["0"])
    assert seen == [
        "bf16", "fp8_tile/bf16/bf16", "fp8_tile/bf16/fp8_tile", "fp8_tile", "fp8_tile", "bf16/fp8_tile/fp8_tile",
    ]  # fmt: skip


def test_evaluation_in_between_does_not_undo_moves():
    model = two_layers()
    control = PrecisionController(model, FREE)
    control.run(plain_loss(model, outliers()))
    moved = gemms(model)
    assert moved["0"] != "fp8_tile"
    with evaluating(model):
        model(outliers())
    control.enter(1)
    assert gemms(model) == moved


def test_state_goes_on_as_if_it_had_not_stopped():
    straight, resumed = (two_layers() for _ in range(2))
    a, b = PrecisionController(straight, FREE), PrecisionController(resumed, FREE)
    for number in range(6):
        a.run(plain_loss(straight, outliers(64 + number)))
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    a.take_rows()
    for number in range(6, 20):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(number))
        assert a.run(plain_loss(straight, x)).loss == b.run(plain_loss(resumed, x)).loss
        assert gemms(straight) == gemms(resumed)
    rows = a.take_rows()
    assert rows == b.take_rows()
    assert {row["after"] for row in rows if row["kind"] == "move"} == {"fp8_tile"}, "quiet rows bring it down again"


@pytest.mark.parametrize("policy", [Policy("bf16_mixed"), Policy("fp8_hybrid"), Policy("fp8_tile")], ids=str)
def test_a_model_with_nothing_to_move_is_refused(policy):
    with pytest.raises(ConfigError, match="fp8_tile"):
        PrecisionController(two_layers(policy))


def test_a_recipe_with_a_controller_keeps_inputs_and_not_their_codes():
    for section in (
        PrecisionSection(mode="fp8_tile", controller={"enabled": True}),
        PrecisionSection(mode="fp8_tile", fp8_until=0.5),
    ):
        assert Policy.from_section(section, "cpu").keep == "value"
    assert Policy.from_section(PrecisionSection(mode="fp8_tile"), "cpu").keep == "qdata"


def test_experts_that_ran_as_one_operation_follow_too():
    model = make_decoder("deepseek")
    convert(model, Policy("fp8_tile", keep="value"))
    control = PrecisionController(model, FREE)
    batch = make_batch(rows=4)
    layer = float8_layers(model)["model.layers.1.mlp.experts.0.gate_proj"]
    outcome = control.run(lambda: model.loss(batch).loss_sum)
    assert outcome.apply
    with control.wider_precision():
        assert layer.gemms == Gemms.all("bf16") or layer.gemms == Gemms.all("fp32")
        model.loss(batch).loss_sum.backward()
    formats = control.controller.formats()
    assert layer.gemms == Gemms.of(*(formats["model.layers.1.mlp.experts.0.gate_proj", gemm] for gemm in GEMM_NAMES))
    model.loss(batch).loss_sum.backward()


def test_moves_samples_and_redone_steps_compile_nothing_anew():
    model = two_layers()
    model.compile(backend="aot_eager", fullgraph=True)
    settings = ControllerSettings(budget=1.0, cooldown=1, patience=1, interval=1, recalibrate_interval=1000)
    control = PrecisionController(model, settings)
    calm, wild = torch.randn(128, 128, generator=torch.Generator().manual_seed(3)), outliers()
    switches, before, graphs = 0, gemms(model), None
    for step in range(24):
        control.run(plain_loss(model, wild if step % 4 < 2 else calm))
        switches += sum(before[name] != now for name, now in gemms(model).items())
        before = gemms(model)
        if step == 0:
            with control.wider_precision():
                plain_loss(model, calm)().backward()
            graphs = counters["stats"]["unique_graphs"]
    assert switches >= 10
    assert counters["stats"]["unique_graphs"] == graphs
