"""`tilewright plan --on h100,4090`: GPUs ranked by time and by energy, each with the plan that it has alone."""

import json
from dataclasses import replace

import pytest

from tests.cli.test_plan import MODEL
from tests.contracts.observe import fixed_ceilings
from tilewright.cli.app import run
from tilewright.planner.machine.gpu_specs import TABLE
from tilewright.planner.planner import Planner


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


def planned(capsys, *options, code=0):
    assert run(["plan", "default", *MODEL, "--train.steps", "100", "--train.minutes", "0", *options]) == code
    return capsys.readouterr()


def test_each_has_the_plan_that_it_has_alone_and_the_least_comes_first(capsys):
    alone = {}
    for name in ("h100", "4090"):
        alone[name] = json.loads(planned(capsys, "--on", name, "--json").out)
    found = json.loads(planned(capsys, "--on", "4090,h100", "--by", "energy", "--json").out)
    assert found["by"] == "energy"
    assert [row["kwh"] for row in found["plans"]] == sorted(row["kwh"] for row in found["plans"])
    for row in found["plans"]:
        own = alone[row["on"]]
        assert row["step_s"] == pytest.approx(own["step_s"])
        assert row["kwh"] == pytest.approx(own["energy"]["kwh"])
        assert row["kwh"] == pytest.approx(TABLE[row["on"]].watts * 100 * own["step_s"] / 3.6e6)
    shown = planned(capsys, "--on", "4090,h100").out
    first = min(alone, key=lambda name: alone[name]["step_s"])
    assert shown.startswith(f"Least time: {first}, ")
    assert shown.count(" kWh") == 2
    assert "without host and cooling" in shown


def test_where_it_fits_none_the_exit_code_is_3(capsys):
    more = ["--on", "h100,4090", "--device-memory", "64MiB", "--disk-memory", "0.001MiB", "--memory.plan", ""]
    shown = planned(capsys, *more, code=3)
    assert "fits none of these GPUs" in shown.err
    assert "does not fit" in shown.out


def test_memory_that_is_not_known_is_not_said_not_to_fit(capsys, monkeypatch):
    of_model = Planner.shape
    monkeypatch.setattr(Planner, "shape", lambda self, recipe: replace(of_model(self, recipe), unknown="no trace"))
    shown = planned(capsys, "--on", "h100,4090", "--json", code=6)
    assert [row["state"] for row in json.loads(shown.out)["plans"]] == ["not known"] * 2
    assert "cannot be predicted" in shown.err


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--by", "energy"], "--by without several GPUs"),
        (["--on", "h100", "--by", "time"], "--by without several GPUs"),
        (["--on", "h100,h200", "--why", "layer.0"], "--why is of the plan of one machine"),
        (["--on", "h100,h200", "--world", "8"], "--world is of the plan of one machine"),
        (["--on", "h100,h100"], "GPU twice in --on"),
        (["--on", "h100,"], "GPU without a name in --on"),
        (["--on", ","], "GPU without a name in --on"),
        (["--on", "h100,5090x"], "Unknown machine name"),
    ],
)
def test_options_that_contradict_each_other(options, match, capsys):
    assert match in planned(capsys, *options, code=2).err
