"""A run whose recipe names a model of the hub: it knows the revision for good, and resumes with it."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.hub_server import FakeHub, serving
from tests.training.test_folder_tokenizer import decoder_folder
from tests.training.tiny import rows, save_tokenizer, settings, tiny
from tilewright.core.config.load import load_recipe
from tilewright.models.folder import hub as downloads
from tilewright.training.session import train

pytest.importorskip("huggingface_hub")
ROOT = Path(__file__).resolve().parents[2]
REPO = "some-org/tiny"
LOAD = {"model__path": REPO, "model__weights": "load"}


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tilewright(command, home, endpoint, values):
    """A command in a process of its own: huggingface_hub reads its variables when it is imported."""
    arguments = [part for name, value in values.items() for part in (f"--{name}", value)]
    environ = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT / "src")}
    line = [sys.executable, "-m", "tilewright", *command, *arguments]
    return subprocess.run(line, env=environ, capture_output=True, text=True, check=False, cwd=home)


def check(run, name):
    """It went on from the third step with the revision that it began with, and told of no other."""
    assert load_recipe(run / "run.toml", environ={}).recipe.model.path == name
    assert [row["step"] for row in rows(run / "events.jsonl") if row["kind"] == "resume"] == [3]
    assert not [row for row in rows(run / "events.jsonl") if "model.path" in row["message"]]


@pytest.fixture
def model(tmp_path):
    folder = decoder_folder(tmp_path / "model")
    save_tokenizer(folder)
    return files_of(folder)


def test_a_run_keeps_the_revision_that_it_began_with(model, data, tmp_path, monkeypatch):
    changes = LOAD | {"train__steps": 3, "checkpoint__export_hf": "true", "lora__rank": 2, "lora__base": "keep"}
    changes |= {"optim__kind": "adamw"}
    with serving(FakeHub({REPO: model})) as hub:
        of_hub = functools.partial(downloads.Hub, endpoint=hub.url, cache=str(tmp_path / "home"))
        monkeypatch.setattr(downloads, "Hub", lambda repo, *_: of_hub(repo))
        train(tiny(data, tmp_path, **changes))
        name = f"{REPO}@{hub.commit(REPO)}"
        hub.repos[REPO] = {**hub.repos[REPO], "config.json": b"{}"}  # main moves on
        hub.asked.clear()
        train(tiny(data, tmp_path, **changes | {"train__steps": 6}))
        assert hub.asked == []
    check(tmp_path / "tiny", name)
    adapter = (tmp_path / "tiny" / "hf" / "adapter_config.json").read_text()
    assert f'"base_model_name_or_path": "{REPO}"' in adapter
    assert f'"revision": "{name.partition("@")[2]}"' in adapter


@pytest.mark.slow
def test_commands_keep_it_too(model, data, tmp_path):
    """Without adapters, and with the hub that the variables of its library name."""
    home = tmp_path / "home"
    home.mkdir()
    changes = LOAD | {"train__steps": 3, "checkpoint__export_hf": "true", "optim__kind": "adamw"}
    with serving(FakeHub({REPO: model})) as hub:
        first = tilewright(["train"], home, hub.url, settings(data, tmp_path, **changes))
        assert first.returncode == 0, first.stderr
        name = f"{REPO}@{hub.commit(REPO)}"
        hub.repos[REPO] = {**hub.repos[REPO], "config.json": b"{}"}
        hub.asked.clear()
        again = tilewright(["train"], home, hub.url, settings(data, tmp_path, **changes | {"train__steps": 6}))
        assert again.returncode == 0, again.stderr
        assert hub.asked == []
    check(tmp_path / "tiny", name)


@pytest.mark.slow
def test_a_plan_needs_no_weights(model, data, tmp_path):
    with serving(FakeHub({REPO: model})) as hub:
        done = tilewright(["plan", "--json"], tmp_path, hub.url, settings(data, tmp_path, **LOAD))
        assert done.returncode == 0, done.stderr
        assert not [line for line in hub.asked if "model.safetensors" in line]


@pytest.mark.slow
def test_no_such_model_is_told_before_anything_is_made(data, tmp_path):
    with serving(FakeHub()) as hub:
        done = tilewright(["train"], tmp_path, hub.url, settings(data, tmp_path / "runs", **LOAD))
    assert done.returncode == 2
    assert "No such model on the hub" in done.stderr
    assert "hf auth login" in done.stderr
