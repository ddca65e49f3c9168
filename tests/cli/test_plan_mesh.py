"""`plan --world`: what it prints and writes, JSON, and each error with its exit code."""

import json
import tomllib

import pytest

from tilewright.cli.app import run
from tilewright.core.config.load import load_recipe

SMALL = [
    *("plan", "default", "--on", "h100", "--model.dim", "4096", "--model.num_layers", "8", "--model.num_heads", "2"),
    *("--data.seq_len", "4096", "--data.source", "", "--train.global_batch_size", "8"),
]
ONE = [*SMALL, "--world", "4", "--nodes", "1x4"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_best_are_shown_with_what_binds_and_why_others_lost(capsys):
    assert run(ONE) == 0
    out = capsys.readouterr().out
    assert "h100 x 4: " in out
    assert "MFU" in out
    for text in ("2 lost: ", "5 lost: ", "searched: ", "published, not measured", "nvlink4", "guessed: collectives"):
        assert text in out, text


def test_what_is_written_is_a_recipe_that_train_reads(capsys, tmp_path):
    assert run([*ONE, "--json", "--out", "found.toml"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"][0]
    text = (tmp_path / "found.toml").read_text()
    recipe = load_recipe("found.toml", {}, environ={}).recipe
    assert tomllib.loads(text)["extends"] == "default"
    for name, value in best["settings"].items():
        section, _, field = name.partition(".")
        read = getattr(getattr(recipe, section), field)
        assert (list(read) if isinstance(read, tuple) else read) == value or f"# {name} = " in text, name
    assert len(found["best"]) == 5
    assert sum(best["parts"].values()) == pytest.approx(1)
    assert [one["seconds"] for one in found["best"]] == sorted(one["seconds"] for one in found["best"])


def test_nothing_fits(capsys):
    assert run([*ONE, "--device-memory", "3GiB"]) == 3
    error = capsys.readouterr().err
    for text in ("does not fit 4 GPUs in any mesh", "nearest of", "need", "--world 8"):
        assert text in error, text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([*SMALL, "--nodes", "2x8"], "--nodes without --world"),
        ([*ONE, "--fastest"], "--fastest is of the plan of one device"),
        ([*ONE, "--disk-memory", "1GiB"], "--disk-memory is of the plan of one device"),
        (["plan", "default", "--world", "4"], "--world without the name of a GPU"),
        ([*SMALL, "--world", "4", "--nodes", "3x2"], "Nodes that do not make up the world"),
        ([*ONE, "--link", "inter=quick"], "Unknown link"),
        ([*SMALL, "--world", "11"], "No mesh fills the world"),
        ([*ONE, "--on", "h1000"], "Unknown machine name"),
    ],
)
def test_wrong_options(arguments, what, capsys):
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert what in error
    assert "try" in error
