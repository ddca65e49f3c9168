"""`tilewright search` on a tiny run: library, scores, table, shapes, page and recipe; killed and continued."""

import json

import pytest

from tests.training.tiny import tiny, write_text
from tilewright.cli.app import run as cli
from tilewright.cli.load_run import open_to_export
from tilewright.compress.search.search_run import LayerSearch
from tilewright.compress.search.search_settings import LayerSearchSettings
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError, FitError
from tilewright.models.decoder.config import DecoderConfig
from tilewright.report.pages.search_page import render_search, verdict_of
from tilewright.training.session import train

pytestmark = pytest.mark.slow
SHAPE = {"model__num_heads": 4, "model__num_kv_heads": 2, "model__ffn_dim": 96, "precision__mode": "fp32"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run that has learned something."""
    options = {"train__steps": 12, "optim__lr": 3e-3, "train__eval_batches": 2, "log__report": False}
    return train(tiny(corpus, tmp_path_factory.mktemp("runs"), **SHAPE, **options)).run_dir


def search_of(run, out, limits="parameters=99%", kinds="ffn,groups,none", said=None, **changes):
    options = {"rows": 8, "block_steps": 3, "steps": 2, "candidates": 2, "context": 8} | changes
    settings = LayerSearchSettings.of(limits, kinds, **options)
    return LayerSearch(open_to_export(run), settings, out, open_to_export, ([] if said is None else said).append)


class Killed(Exception):
    pass


def test_a_search_that_is_killed_continues_behind_what_is_whole(run, tmp_path):
    """Stopped at each tenth line that it says: at the end the record is that of one that was never stopped."""

    def killed_at(turn):
        found = search_of(run, tmp_path / "out")
        lines = []

        def say(text):
            lines.append(text)
            if len(lines) == turn:
                raise Killed

        found.say = say
        return found

    while True:
        try:
            killed_at(10).measure()
            break
        except Killed:
            pass
    found, whole = search_of(run, tmp_path / "out"), search_of(run, tmp_path / "whole")
    whole.measure()
    assert found.record["scores"] == whole.record["scores"]
    losses = [
        {key: (row["begun"], row["error"]) for key, row in one.record["library"].items()} for one in (found, whole)
    ]
    assert losses[0] == losses[1]
    shapes = whole.solve()
    assert 1 <= len(shapes) <= 2
    with pytest.raises(FitError, match="No shape is within the limits") as error:
        search_of(run, tmp_path / "whole", "parameters=1%").solve()
    assert error.value.exit_code == 3
    assert "the nearest has parameters" in error.value.problems[0].got
    nearest = json.loads((tmp_path / "whole" / "search.json").read_text())
    assert "the nearest is at parameters" in verdict_of(nearest)
    assert "Latency table" in render_search(nearest)
    with pytest.raises(ConfigError, match="Folder holds another search"):
        search_of(run, tmp_path / "whole", block_steps=4)


def test_the_command_line_shows_choices_and_hours(run, tmp_path, capsys):
    options = ["--context", "8", "--out", str(tmp_path / "out")]
    assert cli(["search", str(run), "--dry-run", *options]) == 0
    shown = capsys.readouterr().out
    assert "0.ffn" in shown
    assert "ffn-32" in shown
    assert "latency table" in shown
    assert not (tmp_path / "out").exists()
    assert cli(["search", str(run), "--limits", "token=2", *options]) == 2
    assert "Limit is not" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_a_run_is_searched_and_its_recipe_trains(run, tmp_path, capsys):
    """The whole command, twice: the second finds everything done. Its recipe trains from scratch, with its shape."""
    out = tmp_path / "out"
    options = ["--rows", "8", "--block-steps", "5", "--steps", "3", "--candidates", "2", "--context", "16"]
    command = ["search", str(run), "--limits", "parameters=90%", *options, "--out", str(out)]
    assert cli(command) == 0
    record = json.loads((out / "search.json").read_text())
    assert record["verdict"] == "within limits"
    best = record["candidates"][record["chosen"]]
    assert best["costs"]["parameters"] <= 0.9 * record["run_costs"]["parameters"]
    assert best["costs"]["parameters"] == pytest.approx(best["predicted"]["costs"]["parameters"])
    page = (out / "search.html").read_text()
    titles = ("predicted beside trained", "predicted beside measured", "layer by layer", "Each replacement alone")
    for text in (*titles, best["name"]):
        assert text in page
    recipe = load_recipe(out / "search.toml", environ={})
    source = open_to_export(out / best["run"])
    assert DecoderConfig.from_section(recipe.recipe.model, source.tokenizer.vocab_size) == source.model.config
    capsys.readouterr()
    assert cli(command) == 0
    assert json.loads((out / "search.json").read_text())["candidates"] == record["candidates"]
    typed = {"train.steps": "2", "train.minutes": "0", "run.dir": str(tmp_path / "runs"), "run.name": "scratch"}
    typed |= {"log.report": "false", "energy.idle_seconds": "0", "run.threads": "1"}
    typed |= {"ops.cross_entropy": "ref", "ops.adam": "ref", "train.compile": "off"}
    result = train(load_recipe(out / "search.toml", typed, environ={}))
    assert result.step == 2
    assert open_to_export(result.run_dir).model.config == source.model.config
