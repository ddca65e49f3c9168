"""`doctor`: the facts, the kernels with reasons, and JSON for a bug report."""

import json

from tilewright.cli.app import run


def test_json_has_machine_kernels_and_disk(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["device"] == "cpu"
    assert {"torch", "python", "tilewright"} <= set(found["machine"]["versions"])
    assert {"linear", "attention", "adam"} <= {row["op"] for row in found["kernels"]}
    assert found["fp8"]["mode"] == "hybrid_fp16"
    assert found["fp8"]["native"] == []
    assert "BF16, exactly" in found["fp8"]["reason"]
    assert found["disk"]["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_text_names_the_same(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for word in ("device", "memory", "compiler", "versions", "linear", "with reason", "fp8       hybrid_fp16: a CPU"):
        assert word in text
