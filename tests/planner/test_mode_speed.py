"""Modes that are slower than fp32 on a machine: `doctor` and plans name the same ones; `test_pace` has runs."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cover import covering
from tests.planner.rates import make_machine, make_plan, make_rates, make_recipe
from tilewright.cli.app import run
from tilewright.core.hardware import fp8_choice
from tilewright.planner.cost.mode_speed import SLOWER, mode_speeds, slow_mode_notes, slow_modes
from tilewright.planner.machine import ceilings
from tilewright.precision.policy.gemm_formats import SCALED_FORMATS
from tilewright.precision.policy.policy import MODES

CPU = make_machine()
GPU = make_machine(device="cuda")
RATE = st.floats(1e9, 1e15)


def rates(fp32, bf16, fp16, **more):
    row = {"fp32": fp32, "tf32": fp32, "bf16": bf16, "fp16": fp16}
    return make_rates(matmul={fmt: {256: rate / 2, 2048: rate} for fmt, rate in row.items()}, **more)


@given(fp32=RATE, bf16=RATE, fp16=RATE, bandwidth=st.floats(1e9, 1e13), machine=st.sampled_from([CPU, GPU]))
def test_speeds_are_those_of_the_matmuls(fp32, bf16, fp16, bandwidth, machine):
    found = mode_speeds(rates(fp32, bf16, fp16, bandwidth=bandwidth), machine)
    assert found.keys() == set(MODES)
    hybrid = fp16 if machine is GPU else bf16
    expected = {"fp32": fp32, "tf32": fp32, "bf16_mixed": bf16, "hybrid": hybrid, "pure_fp16": fp16}
    assert {mode: found[mode] for mode in expected} == pytest.approx({m: rate / fp32 for m, rate in expected.items()})
    for mode in SCALED_FORMATS:  # the same operands, after they were made and, without a unit, decoded
        decoded_to = "fp32" if mode == "nvfp4" else "bf16_mixed"  # whose values BF16 does not hold
        assert found[mode] < found[decoded_to] or machine is GPU
    assert slow_modes(rates(fp32, bf16, fp16, bandwidth=bandwidth), machine).keys() == {
        mode for mode, speed in found.items() if speed < SLOWER
    }


@pytest.mark.parametrize(("mode", "bf16"), covering(tuple(MODES), (1e11, 1e12, 1e13), pairs=False))
def test_a_plan_names_what_doctor_names(mode, bf16, capsys, tmp_path, monkeypatch):
    found = rates(1e12, bf16, bf16)
    monkeypatch.setattr(ceilings, "known", lambda machine, cache_dir=None: found)
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--json", "--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out)["slower_than_fp32"]
    recipe = make_recipe(precision={"mode": mode})
    notes = slow_mode_notes(recipe, found, CPU)
    assert (mode in told) is bool(notes)
    assert [note for note in make_plan(recipe, 512, CPU, found).notes if "slower than fp32" in note] == list(notes)
    assert run(["doctor", "--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    listed = text.partition("modes slower than fp32 here")[2]
    assert bool(re.search(rf"\b{mode} [\d.]+x", listed)) is (mode in told)
    assert ("none is slower than fp32" in text) is not told


@pytest.mark.parametrize(
    ("features", "wide"), [((), "FP32"), (("avx2",), "FP32"), (("avx512_bf16",), "BF16"), (("bf16",), "BF16")]
)
def test_what_8_bit_operands_are_decoded_to(features, wide):
    """BF16 where the CPU multiplies it, as `ops` does."""
    assert f"decoded to {wide}" in fp8_choice(replace(CPU, cpu_features=frozenset(features))).reason
