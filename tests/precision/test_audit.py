"""The audit: every matmul counted by format and kernel, fallbacks with their reason, resumed and compared."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.training.tiny import tiny, write_text
from tilewright.cli.app import run as command
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.hardware import detect_machine, fp8_choice
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert, set_mode
from tilewright.precision.float8.audit import Audit
from tilewright.precision.float8.audit_table import AuditRow, differences, read_rows, shown
from tilewright.precision.lora.lora import add_lora
from tilewright.precision.policy.gemm_formats import Gemms
from tilewright.precision.policy.policy import Policy, Rule
from tilewright.training.session import train

MACHINE = detect_machine("cpu")
KERNELS = Kernels(MACHINE, {"tile_gemm": "dequant", "linear": "native"})
HOPPER = Kernels(replace(MACHINE, capability=(9, 0)), {"tile_gemm": "dequant"})
"""A machine with an FP8 unit, and a setting that does not use it."""


class Pair(nn.Module):
    """Three layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.down(self.up(x)))


def converted(policy, kernels=KERNELS):
    torch.manual_seed(0)
    model = Pair()
    convert(model, policy, kernels=kernels)
    return model


def step(model, times=1):
    for _ in range(times):
        model(torch.randn(8, 64)).sum().backward()


def found(audit):
    return {(row.layer, row.gemm, row.format): row for row in audit.rows()}


def test_rows_say_kernel_format_calls_and_why():
    model = converted(Policy("fp8_tile", (Rule("down", wgrad="bf16"), Rule("last", compute="bf16")), keep="value"))
    audit = Audit(model)
    step(model, 3)
    model.down.set_gemms(Gemms.of("fp32", "fp8_tile", "bf16"))
    step(model)
    rows = found(audit)
    emulated = fp8_choice(MACHINE).reason
    assert rows["up", "fprop", "fp8_tile"] == AuditRow("up", "fprop", "fp8_tile", "dequant", 4, emulated)
    assert ("up", "dgrad", "fp8_tile") in rows
    assert rows["up", "dgrad", "fp8_tile"].calls == 0  # the model's input wants no gradient
    assert rows["down", "fprop", "fp8_tile"].calls == 3
    assert rows["down", "fprop", "fp32"] == AuditRow("down", "fprop", "fp32", "native", 1)
    assert rows["down", "wgrad", "bf16"] == AuditRow("down", "wgrad", "bf16", "native", 4)
    plain = rows["last", "all", "bf16"]
    assert not plain.counted
    assert plain.kernel == "native"
    assert json.loads(json.dumps(audit.to_json(4)))["rows"] == [row.to_json() for row in audit.rows()]


def test_counts_of_earlier_modes_and_of_before_a_resume_stay():
    model = converted("fp8_tile")
    audit = Audit(model)
    step(model, 2)
    set_mode(model, "bf16_mixed")
    step(model, 5)
    rows = found(audit)
    assert rows["up", "wgrad", "fp8_tile"].calls == 2
    assert rows["up", "all", "bf16"].calls is None
    state = json.loads(json.dumps(audit.state_dict()))
    again = converted("fp8_tile")
    step(again)  # before the state is loaded: not part of the run
    resumed = Audit(again)
    resumed.load_state_dict(state)
    step(again, 3)
    assert found(resumed)["up", "wgrad", "fp8_tile"].calls == 5
    assert resumed.state_dict()["down"] == {name: {"fp8_tile": 5} for name in ("fprop", "dgrad", "wgrad")}


def test_a_kernel_that_does_not_use_the_unit_is_a_fallback():
    model = converted("fp8_tile", HOPPER)
    step(model)
    row = found(Audit(model))["up", "fprop", "fp8_tile"]
    assert row.fallback.startswith("operands are decoded to 16 bits by dequant")
    assert 'ops.tile_gemm = "dequant" was asked for' in row.fallback
    with pytest.raises(HardwareError, match="3 layers fell back to another format") as error:
        Audit(model).check_no_fallbacks()
    assert "the first is up" in str(error.value)
    plain = converted("bf16_mixed")
    step(plain)
    Audit(plain).check_no_fallbacks()


def test_frozen_layers_are_told_apart():
    model = converted("fp8_tile")
    add_lora(model, rank=2, targets=["up"], kernels=KERNELS)
    rows = found(Audit(model))
    assert rows["up", "fprop", "fp8_tile"].calls is None
    assert ("up", "wgrad", "fp8_tile") not in rows
    with pytest.raises(ConfigError, match="not converted"):
        Audit(Pair())


def test_rows_that_differ_by_numbers_are_one_line_with_numbered_reasons():
    rows = [
        AuditRow(f"layers.{i}.{name}", gemm, "fp8_tile", "cpu", 3, reason)
        for i in range(3)
        for name, reason in (("up", "no unit"), ("down", "no luck"))
        for gemm in ("fprop", "dgrad")
    ]
    lines, reasons = shown([*rows, AuditRow("head", "all", "bf16", "native", None)])
    assert lines == [
        ("layers.{0-2}.up  x3", "fprop dgrad", "fp8_tile", "cpu", "9", "[1]"),
        ("layers.{0-2}.down  x3", "fprop dgrad", "fp8_tile", "cpu", "9", "[2]"),
        ("head", "all", "bf16", "native", "not counted", "-"),
    ]
    assert reasons == ["[1] no unit", "[2] no luck"]


BASE = [AuditRow(f"layers.{i}.up", "fprop", "fp8_tile", "scaled_mm", 100) for i in range(2)]
MOVED = [replace(BASE[0], calls=75), AuditRow("layers.0.up", "fprop", "bf16", "native", 25), BASE[1]]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([replace(row, calls=7) for row in BASE], []),
        ([*BASE, AuditRow("layers.0.up", "fprop", "bf16", "native", 0)], []),  # a format that never ran
        (MOVED, [("formats", "fp8_tile 100 %", "bf16 25.0 %, fp8_tile 75.0 %", 1)]),
        ([replace(row, kernel="cpu") for row in BASE], [("kernels", "fp8_tile scaled_mm", "fp8_tile cpu", 2)]),
        ([replace(row, fallback="no unit") for row in BASE], [("fallbacks", "none", "no unit", 2)]),
        (BASE[:1], [("layers", "fp8_tile", "not there", 1)]),
    ],
)
def test_differences(other, expected):
    got = [(item.what, item.first, item.second, item.count) for item in differences(BASE, other)]
    assert got == expected


def test_shares_are_compared_where_formats_are_the_same():
    other = [replace(MOVED[0], calls=50), replace(MOVED[1], calls=50), MOVED[2]]
    (item,) = differences(MOVED, other)
    assert (item.what, item.first, item.second) == (
        "shares", "bf16 25.0 %, fp8_tile 75.0 %", "bf16 50.0 %, fp8_tile 50.0 %",
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    write_text(folder / "text")
    return folder


def audit_of(folder):
    return json.loads((folder / "audit.json").read_text())


def test_a_run_writes_its_audit_and_a_resumed_one_goes_on_counting(data, tmp_path, capsys):
    recipe = {"model__dim": 128, "precision__mode": "fp8_tile", "train__steps": 4, "train__sample_tokens": 0}
    whole = train(tiny(data, tmp_path, run__name="whole", **recipe)).run_dir
    audit = audit_of(whole)
    assert (audit["step"], audit["mode"]) == (4, "fp8_tile")
    rows = {(row.layer, row.gemm): row for row in read_rows(audit)}
    # 4 steps of 5 rows in micro-batches of 2; evaluation is in FP32.
    assert rows["model.layers.0.mlp.up_proj", "wgrad"].calls == 4 * 3
    assert rows["model.layers.1.self_attn.o_proj", "wgrad"].format == "bf16"
    assert rows["lm_head", "all"].calls is None

    half = recipe | {"optim__schedule": "constant"}
    part = train(tiny(data, tmp_path, run__name="part", **half | {"train__steps": 2})).run_dir
    assert read_rows(audit_of(part))[0].calls == 2 * 3
    train(tiny(data, tmp_path, run__name="part", **half))
    assert audit_of(part)["rows"] == audit["rows"]

    other = train(tiny(data, tmp_path, run__name="other", precision__bf16_grad_layers="[]", **recipe)).run_dir
    capsys.readouterr()
    assert command(["inspect", str(whole)]) == 0
    text = capsys.readouterr().out
    assert "executed up to step 4:" in text
    assert f"[1] {fp8_choice(MACHINE).reason}" in text
    assert command(["inspect", str(whole), "--diff", str(part)]) == 0
    assert capsys.readouterr().out.startswith("no difference")
    assert command(["inspect", str(whole), "--diff", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["differences"]
    assert [(item["layer"], item["gemm"], item["what"], item["count"]) for item in found] == [
        ("model.layers.{0-1}.self_attn.o_proj", "dgrad", "formats", 2),
        ("model.layers.{0-1}.self_attn.o_proj", "wgrad", "formats", 2),
    ]
    assert command(["inspect", str(whole), "--diff", str(other)]) == 0
    assert "bf16 100 %" in capsys.readouterr().out


def test_inspect_says_what_is_missing_or_broken(data, tmp_path, capsys):
    assert command(["inspect", str(tmp_path), "--diff", str(tmp_path)]) == 2
    assert "no audit.json in it" in capsys.readouterr().err
    for text in ("{", '{"rows": [{"layer": 1}]}', "[]"):
        (tmp_path / "audit.json").write_text(text)
        assert command(["inspect", str(tmp_path), "--diff", str(tmp_path)]) == 2
        assert "Unreadable file" in capsys.readouterr().err


def test_a_strict_run_stops_at_the_first_step_that_fell_back(data, tmp_path, monkeypatch):
    """The conversion is reported that this machine has an FP8 unit; the kernels that run have none."""
    monkeypatch.setattr("tilewright.precision.assign.conversion_plan.why_emulated", lambda form, machine: "")
    recipe = {"model__dim": 128, "precision__mode": "fp8_tile", "precision__strict": "true"}
    with pytest.raises(HardwareError, match=r"precision\.strict is set"):
        train(tiny(data, tmp_path, run__name="strict", **recipe))
    audit = audit_of(tmp_path / "strict")
    assert (audit["step"], audit["strict"]) == (1, True)
    assert any(row.fallback for row in read_rows(audit))
