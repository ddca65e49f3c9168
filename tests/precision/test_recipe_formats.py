"""MXFP8, MXFP4 and NVFP4 from a recipe: operands against their papers' rules written out in NumPy with ml_dtypes, the
three matmuls of a layer in FP64, and runs, plans, audits and refusals that name them."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.draws import examples
from tests.training.tiny import tiny, write_text
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.hardware import detect_machine
from tilewright.ops.backends.native import dequant_gemm
from tilewright.ops.kernels import Kernels
from tilewright.planner.model.gemms import LinearGemm, multiplied_in
from tilewright.planner.model.operand_bytes import OperandBytes
from tilewright.precision.convert import convert, explain
from tilewright.precision.float8.audit import Audit
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.policy.gemm_formats import Gemms, named_format, why_emulated
from tilewright.precision.policy.policy import Policy, Rule
from tilewright.training.session import train

MODES = ("mxfp8", "mxfp4", "nvfp4")
MACHINE = detect_machine("cpu")
KERNELS = Kernels(MACHINE, compile=False)
each_mode = pytest.mark.parametrize("mode", MODES)


def mx(x, element):
    """OCP MX 1.0, section 6.3: the scale of 32 elements of a row is 2^(floor(log2 amax) - the format's emax)."""
    emax, most = {"e4m3": (8, 448.0), "e2m1": (2, 6.0)}[element]
    kind = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}[element]
    out = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 32):
            block = x[row, start : start + 32].astype(np.float64)
            amax = np.abs(block).max()
            scale = 2.0 ** max(np.frexp(amax)[1] - 1 - emax, -127) if amax else 2.0**-127
            codes = np.clip(block / scale, -most, most).astype(np.float32).astype(kind)
            out[row, start : start + 32] = codes.astype(np.float64) * scale
    return out


def nvfp4(x, rows):
    """NVIDIA 2025, appendix B: blocks of 1x16 (weights 16x16), an E4M3 scale under one in FP32, elements in E2M1."""
    x = x.astype(np.float32)
    amax = np.abs(x).max()
    second = np.float32(amax / np.float32(6 * 448)) if amax else np.float32(1)
    out = np.zeros(x.shape)
    for row in range(0, x.shape[0], rows):
        for start in range(0, x.shape[1], 16):
            block = x[row : row + rows, start : start + 16]
            scale = np.float32(np.abs(block).max() / np.float32(6)) / second
            stored = np.clip(scale, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * second
            codes = np.clip(block / stored, -6, 6).astype(ml_dtypes.float4_e2m1fn)
            out[row : row + rows, start : start + 16] = codes.astype(np.float64) * np.float64(stored)
    return out


def operand(x, mode, *, weight=False):
    """A matrix as a matmul that sums over its columns reads it, FP64."""
    x = x.detach().float().numpy()
    found = nvfp4(x, 16 if weight else 1) if mode == "nvfp4" else mx(x, "e4m3" if mode == "mxfp8" else "e2m1")
    return torch.from_numpy(found)


def assert_product(got, a, b, what):
    """An FP32 sum of K products in any order, of the very operands."""
    want, magnitudes = a @ b.T, a.abs() @ b.abs().T
    excess = (got.double() - want).abs() - a.shape[1] * 2.0**-23 * magnitudes
    at = divmod(int(excess.argmax()), excess.shape[1])
    assert excess.max() <= 0, f"{what}: {got[at].item()!r} at {at}, not {want[at].item()!r}"


@examples(25)
@given(
    mode=st.sampled_from(MODES), rows=st.integers(1, 70), features=st.tuples(st.integers(1, 100), st.integers(1, 70)),
    keep=st.sampled_from(["qdata", "value"]), spread=st.integers(0, 6), seed=st.integers(0, 2**31), kept=st.booleans(),
)  # fmt: skip
def test_each_matmul_quantises_along_what_it_sums(mode, rows, features, keep, spread, seed, kept):
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        wide = torch.exp2(torch.randn(shape, generator=generator) * spread)
        return torch.randn(shape, generator=generator) * wide

    layer = Float8Linear(*features, bias=False)
    layer.kernels, layer.output_dtype = KERNELS, torch.float32
    layer.configure(Gemms.all(mode), power_of_two=True, keep=keep)
    with torch.no_grad():
        layer.weight.copy_(matrix(features[1], features[0]))
    layer.keep_weight(kept)
    x, dy, weight = matrix(rows, features[0]).requires_grad_(), matrix(rows, features[1]), layer.weight
    layer(x).backward(dy)
    out = layer(x).detach()
    assert_product(out, operand(x, mode), operand(weight, mode, weight=True), "fprop")
    assert_product(x.grad, operand(dy, mode), operand(weight.T, mode, weight=True), "dgrad")
    assert_product(weight.grad, operand(dy.T, mode), operand(x.T, mode), "wgrad")


@pytest.mark.parametrize("mode", ["mxfp8", "mxfp4"])
def test_the_unit_for_bf16_multiplies_the_same_numbers(mode, monkeypatch):
    """The same operand bits: a BF16 result may differ from FP32's by the order of the sum alone."""
    forms, x = named_format(mode).operands, torch.randn(40, 96)
    a, b = KERNELS.quantize(x, forms.input), KERNELS.quantize(torch.randn(24, 96), forms.weight)
    seen = []
    run = dequant_gemm.decoded_matmul
    monkeypatch.setattr(dequant_gemm, "decoded_matmul", lambda a, b, *rest: seen.append(a.dtype) or run(a, b, *rest))
    found = []
    for fast in (True, False):
        monkeypatch.setattr(dequant_gemm, "is_fast_bf16", lambda device, fast=fast: fast)
        found.append(KERNELS.tile_gemm(a, b, out_dtype=torch.bfloat16))
    assert seen == [torch.bfloat16, torch.float32]
    want = a.dequantize().double() @ b.dequantize().double().T
    magnitudes = a.dequantize().double().abs() @ b.dequantize().double().abs().T
    for each in found:
        assert ((each.double() - want).abs() <= 2.0**-8 * want.abs() + 96 * 2.0**-23 * magnitudes).all()


@each_mode
def test_a_policy_chooses_it_for_single_matmuls(mode):
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    rules = (Rule("1", dgrad="bf16", wgrad="bf16"), Rule("2", compute="fp32"))
    policy = Policy(mode, rules, device_type="cpu")
    model = convert(model, policy, kernels=KERNELS)
    model(torch.randn(3, 40, requires_grad=True)).sum().backward()
    ran = {(row.layer, row.gemm): (row.format, row.fallback) for row in Audit(model).rows() if row.calls}
    assert {gemm: ran["0", gemm][0] for gemm in ("fprop", "dgrad", "wgrad")} == dict.fromkeys(
        ("fprop", "dgrad", "wgrad"), mode
    )
    assert [ran["1", gemm][0] for gemm in ("fprop", "dgrad", "wgrad")] == [mode, "bf16", "bf16"]
    assert "decoded" in ran["0", "fprop"][1]
    assert "emulated" in str(explain(model, mode))
    only = convert(nn.Sequential(nn.Linear(40, 40)), Policy("bf16_mixed", (Rule("0", fprop=mode),), device_type="cpu"))
    assert only[0].gemms.names == (mode, "bf16", "bf16")


@each_mode
def test_what_it_cannot_be_combined_with_is_refused_by_name(mode):
    with pytest.raises(ConfigError, match="same kind of scale"):
        Gemms.of(mode, "fp8_tile", "bf16")
    unit = MACHINE.__class__(**vars(MACHINE) | {"device": "cuda", "capability": (9, 0)})
    assert mode in why_emulated(named_format(mode), unit)
    with pytest.raises(HardwareError, match=f"in {mode}, the first is 0"):
        convert(nn.Sequential(nn.Linear(40, 40)), Policy(mode, device_type="cpu", strict=True))


@each_mode
def test_a_plan_takes_no_8_bit_unit_for_it(mode):
    unit = MACHINE.__class__(**vars(MACHINE) | {"device": "cuda", "capability": (9, 0)})
    layer = [LinearGemm("0", 200, 72, 1.0, Gemms.all(mode))]
    tile = [LinearGemm("0", 200, 72, 1.0, Gemms.all("fp8_tile"))]
    assert multiplied_in(named_format(mode), {"fp8", "bf16", "fp32"}) == ("fp32" if mode == "nvfp4" else "bf16")
    assert OperandBytes.of(layer, 100, unit, False).forward > OperandBytes.of(tile, 100, unit, False).forward
    both_ways = mode != "nvfp4"  # its weights have square blocks
    more = OperandBytes.of(layer, 100, MACHINE, True).backward - OperandBytes.of(tile, 100, MACHINE, True).backward
    assert more == both_ways * 5 * 200 * 72


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "text")
    return folder


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode == "mxfp8" else pytest.mark.slow) for mode in MODES]
)
def test_a_recipe_trains_in_it(mode, data, tmp_path):
    changes = {"precision__mode": mode, "train__steps": 24, "optim__lr": 3e-3, "train__log_interval": 1}
    changes |= {"checkpoint__interval": 24, "train__eval_interval": 24, "train__sample_tokens": 0}
    changes |= {"model__num_layers": 1, "train__global_batch_size": 2}
    folder = train(tiny(data, tmp_path, **changes)).run_dir
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.2, losses
    rows = json.loads((folder / "audit.json").read_text())["rows"]
    ran = {row["format"] for row in rows if row["calls"] and row["layer"].endswith("up_proj")}
    assert ran == {mode}
    modules = json.loads((folder / "precision.json").read_text())
    assert mode in {row["compute"] for row in modules}


def test_settings_of_fp8_that_do_nothing_here_are_told():
    ours = {"precision.fp8_scale": "fp32", "precision.fp8_min_gain": "2", "precision.bf16_grad_layers": "[]"}
    loaded = load_recipe("default", overrides={"precision.mode": "mxfp8", **ours})
    said = " ".join(loaded.notes)
    assert "fp8_scale" in said
    assert "fp8_min_gain" in said
    assert "bf16_grad_layers" not in said
