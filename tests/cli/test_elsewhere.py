"""A run whose paths were typed relative is read from any folder: run.toml keeps where each path was at the start."""

import json
import shutil

import pytest

from tests.cli.test_train import arguments
from tests.contracts.observe import fixed_ceilings, write_llama, write_texts
from tests.training.tiny import save_tokenizer
from tilewright.cli.app import run
from tilewright.core.config import setting_names
from tilewright.core.config.load import load_recipe

PATHS = {
    "data.source": "texts",
    "data.eval_source": "other",
    "data.tokenizer": "words",
    "data.chat_template": "own.jinja",
    "data.cache_dir": "cache",
    "model.path": "llama",
    "memory.plan": "plan.toml",
    "memory.offload_dir": "spill",
    "distill.teacher": "teacher",
    "distill.cache": "kept",
    "run.dir": "runs",
}
"""Each setting that may name a path, with one that is relative."""


@pytest.fixture(autouse=True)
def _same_rates(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run that was started in it, all of whose paths were typed relative."""
    folder = tmp_path_factory.mktemp("made")
    write_texts(folder / "texts")
    save_tokenizer(folder / "words")
    shutil.copytree(folder / "texts" / "code", folder / "other")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
        typed = {"data__eval_source": "other", "data__tokenizer": "words", "log__report": "false"}
        assert run(["train", *arguments(**typed)]) == 0
    return folder


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another folder, where commands run, with texts of the same name that the run has not seen."""
    (tmp_path / "texts" / "code").mkdir(parents=True)
    (tmp_path / "texts" / "code" / "0.txt").write_text("none of the run's\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = {
    "eval": ["--json"],
    "generate": ["--prompt", "a red", "--tokens", "4"],
    "export": ["--to", "hf", "--no-proof"],
    "compress": ["--dry-run"],
    "search": ["--dry-run"],
    "inspect": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_a_run_read_what_it_was_started_with(command, made, elsewhere, capsys):
    assert run([command, str(made / "runs" / "probe"), *COMMANDS[command]]) == 0
    if command == "eval":
        rows = [json.loads(line) for line in (made / "runs" / "probe" / "metrics.jsonl").read_text().splitlines()]
        found = json.loads(capsys.readouterr().out)["domains"]
        recorded = [row["eval"] for row in rows if "eval" in row][-1]
        assert {name: row["loss"] for name, row in found.items()} == pytest.approx(
            {name: row["loss"] for name, row in recorded.items()}, rel=1e-6
        )


def test_eval_of_a_run_with_a_relative_path_says_that_the_data_is_other(made, elsewhere, capsys):
    """As an earlier version wrote it; in the folder of the run it is the run's own."""
    folder = shutil.copytree(made / "runs" / "probe", made / "runs" / "old")
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace(f'"{made / "texts"}"', '"texts"'))
    shutil.copytree(made / "texts", elsewhere / "texts", dirs_exist_ok=True)
    (elsewhere / "texts" / "code" / "0.txt").write_text("none of the run's\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        assert run(["eval", str(folder)]) == 0
    assert "note: the data" not in capsys.readouterr().err
    assert run(["eval", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["domains"]
    assert f"note: the data is not what the run was trained on: see [data] in {folder / 'run.toml'}" in said.err


def test_a_run_is_continued_from_another_folder(made, elsewhere, capsys):
    """In its own folder and with its own data, whatever `runs` and `texts` are here."""
    folder = shutil.copytree(made / "runs" / "probe", made / "runs" / "copy")
    assert run(["train", str(folder / "run.toml"), "--train.steps", "5"]) == 0
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5]
    events = [json.loads(row) for row in (folder / "events.jsonl").read_text().splitlines()]
    changed = [row["message"].partition(":")[0] for row in events if row["kind"] == "recipe_change"]
    assert not [name for name in changed if name in PATHS and name != "run.dir"]
    assert not (elsewhere / "runs").exists()


def test_the_same_command_elsewhere_is_another_run(made, elsewhere):
    """Only a run's own run.toml names its folder; a recipe of the user's does not."""
    recipe = elsewhere / "mine.toml"
    recipe.write_text((made / "runs" / "probe" / "run.toml").read_text())
    assert run(["train", str(recipe), "--train.steps", "1", "--run.dir", "here"]) == 0
    assert (elsewhere / "here" / "probe" / "run.toml").is_file()


def test_a_path_that_is_gone_says_where_it_was(made, elsewhere, capsys):
    texts = made / "texts"
    texts.rename(made / "away")
    try:
        assert run(["eval", str(made / "runs" / "probe")]) == 2
    finally:
        (made / "away").rename(texts)
    said = capsys.readouterr().err
    file = made / "runs" / "probe" / "run.toml"
    assert f"'{texts}', which does not exist" in said
    assert f"put it back there, or write its new path into {file}" in " ".join(said.split())
    assert all(f"  {part}" in said for part in ("where", "got", "need", "try"))


def test_every_path_of_a_recipe_is_absolute_once_it_is_loaded(tmp_path, monkeypatch):
    """Those that are there, and those that are made there; each setting that may name one is in this test."""
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "llama")
    for name in ("texts", "other", "words", "teacher"):
        (tmp_path / name).mkdir()
    for name in ("own.jinja", "plan.toml"):
        (tmp_path / name).write_text("")
    marked = {item.path for item in setting_names.fields() if item.place is not None}
    assert marked == {*PATHS, "data.sources"} - {"run.dir"}
    for setting, path in PATHS.items():
        if setting != "run.dir":
            given = {setting: path}
            loaded = load_recipe(None, given, environ={})
            assert setting_names.value_at(loaded.recipe.model_dump(), setting) == str(tmp_path / path), setting
    recipe = load_recipe(None, {"data.sources": '{ a = "texts", b = "hf://org/name" }'}, environ={}).recipe
    assert recipe.data.sources == {"a": str(tmp_path / "texts"), "b": "hf://org/name"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("data.source", "installed"), ("data.source", "s3://bucket/folder"), ("data.source", "nothing/there")),
        *(("memory.plan", "auto"), ("model.path", "org/name"), ("distill.teacher", "nothing")),
    ],
)
def test_what_is_no_path_here_stays_as_it_is_written(setting, value, tmp_path, monkeypatch):
    """Words, addresses and names of the hub; and a slip, which an error repeats as it was typed."""
    monkeypatch.chdir(tmp_path)
    for name in ("installed", "auto", "s3://bucket/folder"):  # a tool that knows no addresses makes a folder of one
        (tmp_path / name).mkdir(parents=True)
    recipe = load_recipe(None, {setting: value}, environ={}).recipe
    assert setting_names.value_at(recipe.model_dump(), setting) == value


def test_a_template_is_a_path_only_where_it_looks_like_one(tmp_path, monkeypatch):
    """A bare word is the name of one of the model's templates first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool_use").mkdir()
    given = {"data.chat_template": "tool_use"}
    assert load_recipe(None, given, environ={}).recipe.data.chat_template == "tool_use"
    given["data.chat_template"] = "./tool_use"
    assert load_recipe(None, given, environ={}).recipe.data.chat_template == str(tmp_path / "tool_use")


def test_a_teacher_by_its_runs_name_is_that_run_for_good(tmp_path, monkeypatch):
    """`latest` is another run as soon as the student begins."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "big").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "run.toml").write_text("")
    (tmp_path / "runs" / "latest").symlink_to("big")
    for name in ("big", "runs/big", "latest", "runs/latest"):
        recipe = load_recipe(None, {"distill.teacher": name}, environ={}).recipe
        assert recipe.distill.teacher == str(tmp_path / "runs" / "big"), name
