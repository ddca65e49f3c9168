"""`tilewright plan MODEL`: rows that are what the pasted command plans and measures, and what is no model."""

import json
import shlex
import shutil
from collections import Counter

import pytest

from tests.cli.tuned import arguments, make_model, make_talks
from tests.contracts.observe import fixed_ceilings
from tilewright.cli.app import run
from tilewright.cli.commands.chat_models.plan_model import named_model
from tilewright.cli.commands.chat_models.tuned_recipe import tuned_recipe, with_passes
from tilewright.cli.plan_output import to_json
from tilewright.core.errors import ConfigError
from tilewright.core.units import format_bytes, parse_bytes
from tilewright.formats import fp8_layout
from tilewright.models import build
from tilewright.planner.trace import layer_trace, model_trace
from tilewright.training.assemble import set_up
from tilewright.training.components.recipe_data import prepare_data


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One that tilewright's decoder runs."""
    return make_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """One that transformers' code runs."""
    return make_model(tmp_path_factory.mktemp("qwen3") / "model", "qwen3")


@pytest.fixture
def talks(tmp_path):
    return make_talks(tmp_path / "talks.jsonl")


def settings_of(tmp_path, talks, **changes):
    return ["--data.source", str(talks), *arguments(tmp_path, **changes)]


def planned(capsys, *typed, code=0):
    capsys.readouterr()
    assert run(["plan", *map(str, typed), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def resolved(command):
    """The plan that a pasted `tilewright finetune` begins with."""
    program, name, model, data, option, how, *settings = shlex.split(command)
    assert (program, name, option) == ("tilewright", "finetune", "--how")
    loaded, _ = tuned_recipe(model, [data], how, settings)
    return set_up(with_passes(loaded, prepare_data(loaded.recipe), 3)).plan


@pytest.mark.parametrize(
    ("name", "budget"), [("model", ""), ("model", "8GiB"), pytest.param("foreign", "8GiB", marks=pytest.mark.slow)]
)
def test_the_pasted_command_plans_what_the_row_says(request, name, talks, tmp_path, capsys, budget):
    model = request.getfixturevalue(name)
    typed = settings_of(tmp_path, talks)
    found = planned(capsys, model, *typed, *(["--device-memory", budget] if budget else []))
    assert [way["how"] for way in found["ways"]] == ["lora", "lora_fp8", "full"]
    assert (found["seq_len"], found["global_batch_size"]) == (64, 4)
    for way in found["ways"]:
        assert way["state"] == "fits"
        plan = resolved(way["command"])
        assert to_json(plan) == way["plan"]
        assert not budget or plan.budget.device == parse_bytes(budget)


def test_a_plan_builds_asks_and_traces_a_model_once_for_each_thing_that_differs(foreign, talks, tmp_path, monkeypatch):
    """Three ways, one of them with a twin in BF16: four conversions, of each a row and two. Seconds depend on it."""
    counts = Counter()

    def counted(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **more: (counts.update([name]), real(*args, **more))[1])

    for name in ("document_styles", "has_plain_head", "convert"):
        counted(model_trace, name)
    for name in ("hf_shapes", "load_hf", "whole_architecture"):
        counted(build, name)
    for name in ("_run", "_backward"):
        counted(layer_trace, name)
    counted(model_trace.Tracer, "trace")
    counted(fp8_layout, "quantize")
    assert run(["plan", str(foreign), *settings_of(tmp_path, talks), "--on", "4090", "--json"]) == 0
    built = {"hf_shapes": 1, "load_hf": 3}  # what is checked has real integers, and adapters differ by way
    asked = {"document_styles": 1, "has_plain_head": 1}
    # Of a layer all is measured in 3 passes forward and 3 back, of 8 bits without traffic in 3 and 2, of their twin's
    # traffic in one.
    traced = {"convert": 4, "trace": 8, "_run": 2 * (3 + 3 + 1 + 3), "_backward": 2 * (3 + 2 + 1 + 3)}
    assert counts == built | asked | traced


@pytest.mark.slow
def test_the_dry_run_of_the_pasted_command_has_the_planned_peak_of_the_row(model, talks, tmp_path, capsys):
    found = planned(capsys, model, *settings_of(tmp_path, talks))
    for way in found["ways"]:
        assert run([*shlex.split(way["command"])[1:], "--dry-run"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        peaks = {name: format_bytes(sum(owners.values())) for name, owners in way["plan"]["phases"].items()}
        assert any(f"peak {peak} " in said for peak in peaks.values()), (peaks, said)


def test_a_folder_a_configuration_and_a_table(model, talks, tmp_path, capsys):
    typed = [*settings_of(tmp_path, talks), "--on", "4090"]
    found = planned(capsys, model, *typed)
    same = planned(capsys, model / "config.json", *typed)
    assert [way["plan"] for way in same["ways"]] == [way["plan"] for way in found["ways"]]
    assert run(["plan", str(model), *typed]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Fits: LoRA, FP8 LoRA, all parameters."
    for way in found["ways"]:
        assert f"  {way['command']}" in lines
    assert any("The data is not read: rows of 64 tokens, 4 of them" in line for line in lines)
    assert any("published, not measured" in line for line in lines)


def test_a_budget_that_is_too_small_names_one_that_is_enough(model, talks, tmp_path, capsys):
    typed = [*settings_of(tmp_path, talks), "--on", "4090"]
    found = planned(capsys, model, *typed, "--device-memory", "100MiB", code=3)
    assert {way["state"] for way in found["ways"]} == {"does not fit"}
    assert not any(way["command"] for way in found["ways"])
    least = max(parse_bytes(way["need"].split(" on the device")[0]) for way in found["ways"])
    found = planned(capsys, model, *typed, "--device-memory", str(least))
    assert {way["state"] for way in found["ways"]} == {"fits"}


@pytest.mark.slow
def test_what_the_plan_changes_is_named(model, talks, tmp_path, capsys):
    rows = {"train__global_batch_size": 64, "data__seq_len": 256}
    typed = [*settings_of(tmp_path, talks, **rows), "--on", "4090", "--host-memory", "64GiB"]
    at = typed.index("--train.micro_batch_size")
    typed = [*typed[:at], *typed[at + 2 :]]
    wide = planned(capsys, model, *typed)["ways"][-1]
    assert not wide["changes"]
    none = planned(capsys, model, *typed, "--device-memory", "100MiB", code=3)["ways"][-1]
    least = parse_bytes(none["need"].split(" on the device")[0])
    way = planned(capsys, model, *typed, "--device-memory", str(least))["ways"][-1]
    assert way["state"] == "fits"
    assert way["changes"] or way["layers"]
    assert way["plan"]["peak_bytes"] <= least < wide["plan"]["peak_bytes"]
    for name, value in way["changes"].items():
        assert way["plan"]["settings"][name] == value


@pytest.mark.slow
def test_what_makes_ranks_fit_is_a_command(model, talks, tmp_path, capsys):
    """Gradients that are whole from one micro-batch to the next: the plan may not decide them, so they are offered."""
    raw = json.loads((model / "config.json").read_text())
    model = shutil.copytree(model, tmp_path / "larger")
    (model / "model.safetensors").unlink()  # a plan needs none
    (model / "config.json").write_text(json.dumps(raw | {"hidden_size": 512, "intermediate_size": 2048}))
    changes = {"train__global_batch_size": 16, "train__micro_batch_size": 1, "parallel__dp_shard": 2}
    typed = [*settings_of(tmp_path, talks, **changes), "--on", "4090"]
    reduced = [*typed, "--parallel.reduce_each", "true"]
    none, other = (planned(capsys, model, *each, "--device-memory", "100MiB", code=3) for each in (typed, reduced))
    need, enough = (parse_bytes(one["ways"][-1]["need"].split(" on the device")[0]) for one in (none, other))
    assert none["ways"][-1]["remedy"] is None
    assert enough < need
    fits, too_small = int(need), int(0.9 * enough)  # the smallest budget is one of a smaller machine
    while fits - too_small > 2**20:
        size = (fits + too_small) // 2
        small = ["--device-memory", str(size)]
        capsys.readouterr()
        code = run(["plan", str(model), *map(str, typed), *small, "--json"])
        way = json.loads(capsys.readouterr().out)["ways"][-1]
        if way["remedy"] is not None:
            break
        fits, too_small = (size, too_small) if way["state"] == "fits" else (fits, size)
    assert way["state"] == "does not fit"
    assert not way["command"]
    assert way["remedy"]["settings"] == {"parallel.reduce_each": True}
    pasted = planned(capsys, model, *reduced, *small, code=code)["ways"][-1]
    assert pasted["plan"] == way["remedy"]["plan"]
    assert sorted(shlex.split(pasted["command"])) == sorted(shlex.split(way["remedy"]["command"]))
    run(["plan", str(model), *map(str, typed), *small])
    shown = capsys.readouterr()
    assert "fits with parallel.reduce_each = true" in shown.out
    assert f"  {way['remedy']['command']}" in shown.out.splitlines()


def test_what_is_missing_for_the_commands_is_said(model, talks, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model / "config.json", bare)
    typed = [*settings_of(tmp_path, talks), "--on", "4090"]
    found = planned(capsys, bare, *typed)
    assert [way["plan"]["peak_bytes"] for way in found["ways"]] == [
        way["plan"]["peak_bytes"] for way in planned(capsys, model, *typed)["ways"]
    ]
    assert len(set(found["notes"])) == len(found["notes"]), "each note once"
    notes = " ".join(found["notes"])
    assert "model.safetensors" in notes
    assert "tokenizer" in notes


def test_a_family_that_nobody_knows_is_not_known(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "frobnicator", "hidden_size": 64}))
    found = planned(capsys, tmp_path, "--on", "4090", code=6)
    assert all("frobnicator" in way["unknown"] and not way["command"] for way in found["ways"])
    assert run(["plan", str(tmp_path), "--on", "4090"]) == 6
    assert "not known" in capsys.readouterr().out


def test_what_is_of_one_recipe_or_of_this_machine_is_refused(model, capsys):
    for typed, said in (
        (["--why", "layer.0"], "of the plan of one recipe"),
        (["--largest"], "of the plan of one recipe"),
        (["--host-memory", "8GiB"], "Host and disk budgets"),
        (["--device-memory", "24Gb"], "Invalid memory size"),
        (["--on", "5090x"], "Unknown machine name"),
        (["--data.seq_len", "-1"], "data.seq_len"),
    ):
        assert run(["plan", str(model), *typed]) == 2
        assert said in capsys.readouterr().err


def test_recipes_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("default", "mine", "org"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "org" / "tiny.toml").write_text("")
    assert named_model("default") is None
    assert named_model("./default") == "./default"
    assert named_model("mine") == "mine"
    assert named_model("mine/config.json") == "mine"
    assert named_model("meta-llama/Llama-3.1-8B@main") == "meta-llama/Llama-3.1-8B@main"
    assert named_model("org/tiny.toml") is None
    assert named_model("org/tinny") is None  # the error then asks whether tiny.toml is meant
    assert named_model("defualt") is None
    with pytest.raises(ConfigError, match="No such configuration"):
        named_model("nothing/config.json")
