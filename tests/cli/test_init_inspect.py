"""`init` and `inspect`: recipes written here, values with sources, schema, runs and checkpoints."""

import json

import pytest

from tilewright.cli.app import run
from tilewright.core.config import setting_names
from tilewright.core.config.load import load_recipe, shipped_recipes, write_run_toml
from tilewright.core.config.toml import RECIPES


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", shipped_recipes())
def test_init_copies_a_recipe_that_loads_the_same(tmp_path, name):
    assert run(["init", name]) == 0
    written = tmp_path / f"{name}.toml"
    assert written.read_bytes() == (RECIPES / f"{name}.toml").read_bytes()
    assert load_recipe(written, environ={}).recipe == load_recipe(name, environ={}).recipe


def test_init_does_not_overwrite(capsys, tmp_path):
    (tmp_path / "default.toml").write_text("mine")
    assert run(["init"]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "default.toml").read_text() == "mine"
    assert run(["init", "--force"]) == 0
    assert run(["init", "--to", "no/such/folder.toml"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_init_list_names_all_with_a_line(capsys):
    assert run(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped_recipes()
    assert all(len(line.split()) > 3 for line in lines)


def test_init_unknown_recipe(capsys):
    assert run(["init", "nope"]) == 2
    assert ", ".join(shipped_recipes()) in capsys.readouterr().err


def test_inspect_lists_every_setting_with_its_source(capsys):
    assert run(["inspect", "fp32", "--train.steps", "5", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(rows) == [field.path for field in setting_names.fields()]
    assert rows["train.steps"] == {"value": 5, "source": "cli"}
    assert rows["precision.mode"] == {"value": "fp32", "source": "file fp32.toml"}
    assert rows["model.dim"]["source"] == "extends default.toml"


def test_inspect_prints_one_line_a_setting_and_notes(capsys):
    assert run(["inspect", "--model.kv_lora_rank", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(list(setting_names.fields())) + 1
    assert lines[-1].startswith("note: model.kv_lora_rank has no effect here")


def test_inspect_schema_is_a_json_schema_that_knows_the_choices(capsys):
    assert run(["inspect", "--schema"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "extends" in found["properties"]
    assert found["additionalProperties"] is False
    assert "hybrid" in json.dumps(found["$defs"]["PrecisionSection"]["properties"]["mode"])
    start = found["$defs"]["PrecisionSection"]["properties"]["start_mode"]
    assert {"const": "none"} in start["anyOf"]
    assert {"type": "string"} in found["$defs"]["DataSection"]["properties"]["max_bytes"]["anyOf"]


def test_inspect_a_run_folder(capsys, tmp_path):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    write_run_toml(load_recipe("default", environ={}), folder / "run.toml")
    (folder / "precision.json").write_text(json.dumps([{"fqn": "head", "op": "head", "compute": "bf16"}]))
    kernel = {"op": "linear", "case": "cpu float32", "chosen": "native", "rejected": [["compiled", "no compiler"]]}
    (folder / "machine.json").write_text(json.dumps({"kernels": [kernel]}))
    assert run(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "head" in text
    assert "compiled: no compiler" not in text
    assert "matmul work:" not in text
    assert run(["inspect", str(folder), "-v"]) == 0
    assert "compiled: no compiler" in capsys.readouterr().out
    rows = [{"fqn": "head", "op": "head", "compute": "bf16", "gemms": None, "work": 1.0}]
    gemms = {"fprop": "fp8_tile", "dgrad": "fp8_tile", "wgrad": "bf16"}
    rows += [{"fqn": "up", "op": "linear", "compute": "fp8_tile/fp8_tile/bf16", "gemms": gemms, "work": 3.0}]
    (folder / "precision.json").write_text(json.dumps(rows))
    assert run(["inspect", str(folder)]) == 0
    assert "matmul work: 50.0 % bf16, 50.0 % fp8_tile" in capsys.readouterr().out
    assert run(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["work"] == {"fp8_tile": 0.5, "bf16": 0.5}
    (folder / "precision.json").write_text("{")
    assert run(["inspect", str(folder)]) == 2
    assert "Unreadable file in the run folder" in capsys.readouterr().err


def test_inspect_nothing(capsys):
    assert run(["inspect", "nowhere"]) == 2
    assert "No such recipe" in capsys.readouterr().err
