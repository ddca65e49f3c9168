"""`tilewright precision search` on a tiny model: its files, its policy trained, and what it refuses."""

import json
import math
import subprocess
import sys
import tomllib

import pytest

from tests.contracts.observe import fixed_ceilings, write_texts
from tests.contracts.test_settings import BASE
from tilewright.cli.app import run
from tilewright.core.config.load import load_recipe
from tilewright.precision.policy.gemm_formats import GEMM_NAMES

SETTINGS = BASE | {"data.source": "texts", "data.cache_dir": "cache", "optim.lr": "1e-2"}
FAST = ("--warmup", "8", "--batches", "2", "--rows", "1", "--time", "ideal")


def arguments(**changes: str) -> list[str]:
    settings = SETTINGS | {name.replace("__", "."): value for name, value in changes.items()}
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with data, and with a search at a budget that some layers do not fit into."""
    folder = tmp_path_factory.mktemp("search")
    write_texts(folder / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
        assert run(["precision", "search", "--budget", "0.0005%", *FAST, *arguments()]) == 0
    return folder


@pytest.fixture(autouse=True)
def _there(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


def test_all_measurements_are_in_the_json(here):
    facts = json.loads((here / "policy.json").read_text())
    assert facts["budget"] == pytest.approx(5e-6)
    assert len(facts["units"]) == 14
    for unit in facts["units"]:
        assert set(unit["matmuls"]) == set(GEMM_NAMES)
        assert len(unit["matmuls"]["fprop"]["loss_change"]) == 2
        assert set(unit["underflow"]) == {"x", "weight", "dy"}
    chosen = facts["chosen"]
    assert 0 < len(chosen["fp8"]) < 42
    assert chosen["predicted"]["change"] <= 5e-6 * (1 + 1e-6)
    assert math.isfinite(chosen["measured"]["change"])
    everything = next(mark for mark in facts["landmarks"] if mark["name"] == "all FP8")
    assert everything["predicted"]["change"] > 5e-6
    assert everything["seconds"] < chosen["seconds"]


def test_the_policy_file_is_a_recipe_that_trains_as_it_says(here):
    text = (here / "policy.toml").read_text()
    assert tomllib.loads(text)["extends"] == "default"
    assert "# model.layers.0.self_attn.q_proj  loss" in text
    assert run(["train", "policy.toml", "--train.steps", "2"]) == 0
    facts = json.loads((here / "policy.json").read_text())
    rows = {row["fqn"]: row for row in json.loads((here / "runs" / "policy" / "precision.json").read_text())}
    for unit in facts["units"]:
        wanted = [unit["matmuls"][gemm]["format"] for gemm in GEMM_NAMES]
        row = rows[unit["name"]]
        found = [row["gemms"][gemm] for gemm in GEMM_NAMES] if row["gemms"] else [row["compute"]] * 3
        assert found == wanted
    assert load_recipe("policy.toml", environ={}).recipe.model.dim == 16


def test_the_curve_is_a_picture_that_opens_by_itself(here):
    from xml.etree import ElementTree

    root = ElementTree.fromstring((here / "policy.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = "".join(root.itertext())
    for name in ("all BF16", "all FP8", "chosen", "a bound"):
        assert name in text


def test_a_policy_of_another_model_is_refused_with_near_names(here, capsys):
    rules = '\n[[precision.rules]]\nmatch = "model.layers.7.mlp.down_proj"\nfprop = "bf16"\n'
    (here / "other.toml").write_text((here / "policy.toml").read_text() + rules)
    assert run(["train", "other.toml"]) == 2
    text = capsys.readouterr().err
    assert "matches no module" in text
    assert "near names: model.layers.1.mlp.down_proj" in text


def test_files_that_are_there_are_kept(here, capsys):
    before = (here / "policy.toml").read_text()
    assert run(["precision", "search", *FAST, *arguments()]) == 2
    assert "Files already exist" in capsys.readouterr().err
    assert run(["precision", "search", "policy.toml", "--force", *FAST]) == 2
    assert "would replace the recipe that it extends" in capsys.readouterr().err
    assert run(["precision", "search", *FAST, "--out", "nowhere/p.toml", *arguments()]) == 2
    assert "No such folder" in capsys.readouterr().err
    assert (here / "policy.toml").read_text() == before


def test_an_impossible_budget_exits_with_3_and_writes_nothing(here, capsys):
    rules = '[{ match = "*.down_proj", compute = "fp8_tile" }]'
    command = ["precision", "search", "--out", "none.toml", *FAST, *arguments(precision__rules=rules)]
    assert run([*command, "--budget", "0.0000001%"]) == 3
    text = capsys.readouterr().err
    assert "best possible, with 6 matmuls in FP8" in text
    assert "--budget" in text
    assert not (here / "none.toml").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--budget", "lots"], "percent"),
        (["--run", "nosuch"], "No such run"),
        (["--precision.enabled", "false"], "Precision search needs precision.enabled"),
        (["--precision.fp32_ops", '["linear"]'], "No linear layer of this model can compute in FP8"),
        (["--precision.rules", '[{ match = "*.down_proj", compute = "fp8_hybrid" }]'], "fp8_tile and bf16 only"),
        (["--batch", "2"], "Did you mean --batches?"),
    ],
)
def test_what_cannot_be_searched_says_why(more, told, capsys):
    assert run(["precision", "search", "--out", "none.toml", *FAST, *arguments(), *more]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_weights_of_a_run(here, capsys):
    assert run(["train", *arguments(run__name="probe", train__steps="6")]) == 0
    command = ["precision", "search", "--run", "probe", "--out", "from_run.toml", "--json", *FAST]
    assert run([*command, *arguments()]) == 0
    output = capsys.readouterr().out
    facts = json.loads(output[output.index("{") :])
    assert facts["weights"] == "probe"
    rows = [json.loads(line) for line in (here / "runs" / "probe" / "metrics.jsonl").read_text().splitlines()]
    last = [row["loss"] for row in rows if "loss" in row][-1]
    assert facts["losses"][0] == pytest.approx(last, rel=0.2)
    assert run([*command, "--force", *arguments(model__dim="32")]) == 2
    assert "another model" in capsys.readouterr().err


def test_help_is_quick_and_needs_no_torch():
    code = "import sys; from tilewright.cli.app import run; run(['precision', 'search', '--help']); "
    code += "sys.exit('torch' in sys.modules or 'highspy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
