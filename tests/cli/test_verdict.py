"""Runs that really diverge, and one that learns, from the command line to the report: nothing overflows on the way."""

import json
import re

import pytest

from tests.cli.test_train import arguments
from tests.contracts.observe import fixed_ceilings, write_texts
from tests.cover import some
from tilewright.cli.app import run

EVERY_STEP = {"train__eval_interval": "1", "train__eval_batches": "1", "optim__schedule": "constant"}
CONTROLLER = {"precision__controller__enabled": "true"}
# name -> (settings, exit code); the loss goes to 8e6, 345,341 and the like, with gradients finite or not
DIVERGING = {
    "1e4": ({"optim__lr": "1e4", "train__steps": "8"}, 4),
    "1e3, two steps": ({"optim__lr": "1e3", "train__steps": "2"}, 0),
    "40": ({"optim__kind": "adamw", "optim__lr": "40", "train__steps": "30"}, 0),
    "fp16": ({"optim__lr": "1e3", "train__steps": "30", "precision__mode": "pure_fp16"}, 4),
    "controller": (
        {"optim__lr": "1e3", "train__steps": "12", "precision__mode": "fp8_tile", **CONTROLLER},
        4,
    ),
    "delayed": (
        {"optim__lr": "1e3", "train__steps": "8", "memory__executor": "layer_major", "optim__clip": "delayed"},
        4,
    ),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verdicts")
    write_texts(folder / "texts")
    return folder


@pytest.fixture(autouse=True)
def _there(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


def strict(text: str) -> dict:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def headline(page: str) -> str:
    found = re.search(r"<h1>(.*?)</h1>", page, re.DOTALL)
    assert found is not None
    return found[1].strip().replace("\u00a0", " ")


@pytest.mark.parametrize("name", some(DIVERGING, "1e4", "1e3, two steps", "controller"))
def test_a_run_that_diverged_says_so_on_the_page_and_on_the_screen(here, capsys, name):
    settings, code = DIVERGING[name]
    folder = here / "runs" / f"diverging-{list(DIVERGING).index(name)}"
    assert run(["train", *arguments(run__name=folder.name, **EVERY_STEP, **settings)]) == code
    said = capsys.readouterr().out
    assert "verdict: bad: The run diverged" in said, said
    assert headline((folder / "report.html").read_text()).startswith("The run diverged")
    for file in ("metrics.jsonl", "events.jsonl"):
        assert all(strict(line)["step"] >= 0 for line in (folder / file).read_text().splitlines())
    (folder / "report.html").unlink()
    assert run(["report", folder.name]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("verdict: bad: The run diverged")
    assert last.endswith("report.html")
    last_event = strict((folder / "events.jsonl").read_text().splitlines()[-1])
    assert last_event.get("cause") == ("numerics" if code == 4 else None)
    if any((folder / "checkpoints").iterdir()):
        assert run(["eval", folder.name, "--json"]) == 0
        assert strict(capsys.readouterr().out)["domains"]
        assert run(["eval", folder.name]) == 0


def test_a_run_that_learns_says_what(here, capsys):
    changes = {"run__name": "learns", "train__steps": "60", "train__eval_interval": "20", "optim__lr": "1e-2"}
    changes |= {"optim__clip_norm": "0", "checkpoint__interval": "30"}
    assert run(["train", *arguments(**changes)]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("verdict: ")]
    assert "diverged" not in said
    page = (here / "runs" / "learns" / "report.html").read_text()
    assert re.search(r"The loss fell from 5\.\d\d to [2-4]\.\d\d nats per token in 60 steps, and held-out", page)
    for rule in ("Divergence", "Plateau", "Memorising", "Forgetting", "Loss spikes"):
        assert f"{rule}: good" in page, rule
    assert "Clipping: not measured" in page
    assert line.endswith("not measured)")


def test_a_short_run_is_not_called_good(here, capsys):
    assert run(["train", *arguments(run__name="short", log__report="false")]) == 0
    said = capsys.readouterr().out
    # Memory alone is judged from the first step; what else ran in this process decides what is said of it.
    expected = r"^verdict: (not measured: The loss .* Too few to judge: 3 values|.*The plan was)"
    assert re.search(expected, said, re.MULTILINE), said
    page = here / "runs" / "short" / "report.html"
    assert not page.exists()
    assert run(["report", "short", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(page)]
    assert "Too few to judge: 3 values are recorded, 20 are needed." in page.read_text()


def test_a_dry_run_has_no_verdict(here, capsys):
    assert run(["train", "--dry-run", *arguments(run__name="dry")]) == 0
    assert "verdict" not in capsys.readouterr().out
