"""`doctor`: the facts, the kernels with reasons, and JSON for a bug report."""

import json

import torch

from tilewright.cli.app import run
from tilewright.core import hardware


def test_json_has_machine_kernels_and_disk(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["device"] == "cpu"
    assert {"torch", "python", "tilewright"} <= set(found["machine"]["versions"])
    assert {"linear", "attention", "adam"} <= {row["op"] for row in found["kernels"]}
    assert found["fp8"]["mode"] == "hybrid_fp16"
    assert found["fp8"]["native"] == []
    multiplied = hardware.cpu_multiplies(torch.bfloat16, hardware.cpu_features())
    assert f"decoded to {'BF16' if multiplied else 'FP32'}" in found["fp8"]["reason"]
    assert found["disk"]["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_text_names_the_same(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for word in ("device", "memory", "compiler", "versions", "linear", "kernel", "fp8       hybrid_fp16: a CPU"):
        assert word in text
    assert "with reason" not in text.split("-v")[0]


def test_candidates_and_reasons_are_printed_when_asked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    reasons = {": ".join(pair) for row in rows for pair in row["rejected"]}
    assert reasons
    assert run(["doctor", "--device", "cpu"]) == 0
    short = capsys.readouterr().out
    assert not [reason for reason in reasons if reason in short]
    assert run(["doctor", "--device", "cpu", "-v"]) == 0
    long = capsys.readouterr().out
    assert not [reason for reason in reasons if reason not in long]
    assert "unavailable, with reason" in long


def test_variables_that_limit_the_cpu_are_shown(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "_cpu_flags", lambda _: frozenset({"avx2", "avx512f", "avx512_bf16"}))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert run(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "vectors   avx2 (the CPU has more: ONEDNN_MAX_CPU_ISA=avx2, ATEN_CPU_CAPABILITY=avx2)" in text
    assert "no BF16 instructions" in text
    assert "8-bit operands are decoded to FP32" in " ".join(text.split())
    assert run(["doctor", "--device", "cpu", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert machine["cpu_features"] == ["avx2"]
    assert machine["cpu_limits"] == ["ONEDNN_MAX_CPU_ISA=avx2", "ATEN_CPU_CAPABILITY=avx2"]
