"""The folder of a compression or a search: one command at a time, moved and copied folders, and a command that was
killed while it wrote a model."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.optim.test_citizen import assert_in_words
from tests.training.tiny import last_state, tiny, write_text
from tilewright.cli.app import run as cli
from tilewright.cli.commands.outputs.stage_commands import alone_in, page_behind
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.compress_run import Compression
from tilewright.compress.budget.compress_settings import CompressSettings
from tilewright.compress.budget.stage_runs import run_stage, stage_recipe, write_model
from tilewright.compress.exports_file import read_exports, write_exports
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import CheckpointError, ConfigError, FitError
from tilewright.training.session import train

SHAPE = {"model__num_heads": 4, "model__num_kv_heads": 2, "model__ffn_dim": 64, "precision__mode": "fp32"}
COMMAND = ["--steps", "1", "--tries", "1", "--controls", "none", "--targets", "hf", "--cut", "ffn", "--budget", "500%"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write_text(folder / "text")
    return train(tiny(folder, folder / "runs", **SHAPE, train__steps=4, log__report=False)).run_dir


@pytest.fixture
def run(made, tmp_path):
    """A copy that a test may move."""
    return shutil.copytree(made, tmp_path / "runs" / "tiny")


def asked(run, out, said=None):
    settings = CompressSettings.of("500%", "hf", "ffn", steps=1, tries=1, controls="none", batches=1)
    lines = [] if said is None else said
    return Compression(open_to_export(run), settings, out, open_to_export, lines.append)


@pytest.mark.parametrize("command", [["compress", *COMMAND], ["compress", "--dry-run"], ["search"]])
@pytest.mark.parametrize("other", ["compress", "search"])
def test_a_second_command_in_the_folder_is_refused(command, other, run, tmp_path, capsys):
    """Whatever both ask for: stages and record would be of both."""
    with alone_in(tmp_path / "out"):
        assert cli([command[0], str(run), *command[1:], "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "Another process works in this folder of stages" in said
    assert all(f"  {part}" in said for part in ("where", "got", "need", "try"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_folder_that_is_no_folder_is_refused(run, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert cli(["compress", str(run), *COMMAND, "--out", str(tmp_path / "out")]) == 2
    assert "Folder of stages cannot be written" in capsys.readouterr().err


def elsewhere(folder):
    """A folder moved out of its parent."""
    return folder.rename(folder.parents[0 if folder.name == "out" else 1] / "elsewhere" / folder.name)


def copied(folder):
    return shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"), symlinks=True)


MOVES = {
    "run": lambda run, out: (elsewhere(run), out),
    "renamed run": lambda run, out: (run.rename(run.with_name("other")), out),
    "stages": lambda run, out: (run, elsewhere(out)),
    "both": lambda run, out: (elsewhere(run), elsewhere(out)),
    "copied stages": lambda run, out: (run, copied(out)),
}


@pytest.mark.parametrize("moved", MOVES.values(), ids=MOVES)
def test_moved_folders_are_continued(moved, run, tmp_path, monkeypatch):
    """After a stage has ended the same command, with the paths of now, finds it; nothing names the old places."""
    out, said = tmp_path / "out", []
    first = asked(run, out, said)
    row = first._recovered(first.plan()[0])
    artefact = {"target": "hf", "state": "ran", "path": str(out / "artefacts" / "one"), "of": row["run"]}
    first.record["artefacts"] = [artefact]
    write_exports(out / row["run"], {"artefacts": [dict(artefact)]})
    first.plan()
    lines = len(said)
    (tmp_path / "elsewhere").mkdir()
    run, out = moved(run, out)
    monkeypatch.chdir(tmp_path)
    again = asked(run.relative_to(tmp_path), out.relative_to(tmp_path), said)
    assert again.record["run"] == run.name
    assert again._recovered(again.plan()[0]) == row
    assert len(said) == lines, "a finished stage was done again"
    stage = load_recipe(out / row["run"] / "run.toml", environ={}).recipe
    assert stage.run.dir == str(out)
    assert stage.model.path == str(out / "cut" / row["name"])
    assert stage.distill.teacher == str(run)
    assert stage.distill.cache == str(out / "teacher")
    assert stage.data.tokenizer == str(run / "tokenizer.json")
    assert again.record["artefacts"][0]["path"] == str(out / "artefacts" / "one")
    assert read_exports(out / row["run"])["artefacts"][0]["path"] == str(out / "artefacts" / "one")
    assert open_to_export(out / row["run"]).data  # of the tokenizer that is there
    if first.out != out and first.out.exists():
        assert load_recipe(first.out / row["run"] / "run.toml", environ={}).recipe.run.dir == str(first.out)


def test_a_stage_is_continued_where_it_was_moved(run, tmp_path):
    """In the middle of its steps; its weights are those of one that was stopped there too, and stayed."""

    def trained(out, steps):
        source = open_to_export(run)
        write_model(source, source.model, out / "whole")
        recipe = stage_recipe(source, "stage", out, folder=out / "whole", taught=True, steps=4)
        return run_stage(changed(recipe, {"train.steps": steps}), source)

    trained(tmp_path / "a", 2)
    stayed = trained(tmp_path / "a", 4)
    trained(tmp_path / "b", 2)
    (tmp_path / "b").rename(tmp_path / "c")
    moved = trained(tmp_path / "c", 4)
    (tensors, _), (expected, _) = last_state(moved), last_state(stayed)
    assert expected.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


class StoppedError(BaseException):
    """As a kill: nothing but `finally` sees it."""


def test_a_model_is_whole_or_not_there(run, tmp_path, monkeypatch):
    """transformers writes config.json before the weights: a killed command left a folder that was taken for whole."""
    source, whole = open_to_export(run), tmp_path / "cut" / "whole"

    def killed(folder, **how):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "config.json").write_text("{}")
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(source.model, "save_hf", killed)
        with pytest.raises(StoppedError):
            write_model(source, source.model, whole)
    assert not whole.exists()
    write_model(source, source.model, whole)
    assert (whole / "model.safetensors").is_file()
    before = (whole / "config.json").stat().st_mtime_ns
    write_model(source, source.model, whole)
    assert before == (whole / "config.json").stat().st_mtime_ns


@pytest.mark.parametrize("name", ["hidden", "attention"])
def test_pairs_of_layers_beside_cut_layers_are_refused(name, run, tmp_path):
    """Before anything is measured: the first recovery would refuse them."""
    source = open_to_export(run)
    source = replace(source, recipe=changed(source.recipe, {f"distill.{name}": {"1": 1}}))
    settings = CompressSettings.of("5%", "hf", "ffn,layers")
    with pytest.raises(ConfigError) as error:
        Compression(source, settings, tmp_path / "out", open_to_export, print)
    assert_in_words(error.value, f"distill.{name}", "--cut ffn,heads")
    assert not (tmp_path / "out").exists()


def test_of_two_errors_the_first_is_raised(capsys):
    """A page that cannot be written beside a stage that failed is a line."""

    def full():
        raise CheckpointError("Page cannot be written", got="disk full")

    with pytest.raises(FitError, match="budget"), page_behind(full):
        raise FitError("Loss budget was not reached")
    assert "no page: disk full" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="Page"), page_behind(full):
        pass
