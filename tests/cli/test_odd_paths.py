"""Paths at which no file can be, wherever a command takes one: a user's error, at once and without a traceback."""

import errno

import pytest

from tests.cli.test_train import arguments
from tests.contracts.observe import write_llama, write_texts
from tilewright.cli.app import run
from tilewright.core.config import setting_names
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError

LONG = "x" * 5000
DEEP = "/".join(["x" * 200] * 30)
ARGUMENTS = {
    "recipe": ["train", LONG],
    "plan": ["plan", LONG],
    "plan --html": ["plan", "tiny_moe", "--html", LONG],
    "plan --out": ["plan", "tiny_moe", "--out", LONG],
    "build": ["data", "build", LONG],
    "build --out": ["data", "build", "none.toml", "--out", LONG],
    "inspect data": ["data", "inspect", LONG],
    "inspect --diff": ["data", "inspect", "none", "--diff", LONG],
    "skip": ["data", "skip", LONG, "--steps", "1:2"],
    "eval": ["eval", LONG],
    "eval --include-path": ["eval", "none", "--include-path", LONG],
    "generate": ["generate", LONG],
    "chat": ["chat", LONG, "--message", "hi"],
    "serve": ["serve", LONG],
    "merge": ["merge", LONG, "--out", "here"],
    "merge --out": ["merge", "none", "--out", LONG],
    "inspect": ["inspect", LONG],
    "report": ["report", LONG],
    "watch": ["watch", LONG],
    "compress": ["compress", LONG],
    "compress --out": ["compress", "none", "--out", LONG],
    "search": ["search", LONG],
    "search --out": ["search", "none", "--out", LONG],
    "export": ["export", LONG, "--to", "hf"],
    "export --out": ["export", "none", "--out", LONG],
    "finetune": ["finetune", LONG, "rows.jsonl"],
    "finetune data": ["finetune", "llama", LONG],
    "init": ["init", LONG],
    "init --to": ["init", "tiny_moe", "--to", LONG],
    "precision": ["precision", "search", LONG],
    "precision --out": ["precision", "search", "tiny_moe", "--out", LONG],
    "bench": ["bench", "step", LONG],
    "bench --out": ["bench", "comm", "--out", LONG],
    "simulate --html": ["simulate", "--html", LONG],
    "simulate --table": ["simulate", "--table", LONG],
}
"""Each argument and option that takes a path, with one that is too long."""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """With what is there where the path that is too long stands beside another one."""
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "llama")
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')


def check_said(err: str) -> None:
    assert err.startswith("tilewright: ")
    assert all(f"  {part}" in err for part in ("got", "need", "try"))
    assert "Traceback" not in err
    assert len(err) < 3000


@pytest.mark.parametrize("what", ARGUMENTS)
def test_an_argument_that_is_too_long_for_a_path_is_an_error_without_a_traceback(what, capsys):
    assert run(ARGUMENTS[what]) == 2
    said = capsys.readouterr().err
    check_said(said)
    assert "xxx" in said


@pytest.mark.parametrize("text", [LONG, DEEP], ids=["one name", "many names"])
def test_every_path_of_a_recipe_is_checked_as_it_is_loaded(text):
    """All of them in one error, with their places."""
    paths = [item.path for item in setting_names.fields() if item.place is not None and item.path != "data.sources"]
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, {path: text for path in paths} | {"data.sources": f'{{ a = "{text}" }}'}, environ={})
    found = {problem.what.partition(" ")[0]: problem for problem in caught.value.problems}
    assert found.keys() == {*paths, "data.sources"}
    assert all("longer than a path can be" in problem.what for problem in found.values())
    assert all(one.got and one.need and one.try_ and path in one.where for path, one in found.items())


@pytest.mark.parametrize("text", ["s3://bucket/" + "k" * 900, "hf://datasets/" + "o" * 300])
def test_an_address_may_be_longer(text):
    assert load_recipe(None, {"data.source": text}, environ={}).recipe.data.source == text


@pytest.mark.parametrize("setting", ["read.source", "read.sources", "tokenizer.path"])
@pytest.mark.parametrize("text", [LONG, "a\\u0000b"], ids=["long", "NUL"])
def test_a_path_of_a_build_that_cannot_be_one_is_an_error(setting, text, tmp_path, capsys):
    write_texts(tmp_path / "texts")
    section, _, name = setting.partition(".")
    value = f'{{ a = "{text}" }}' if name == "sources" else f'"{text}"'
    given = '[read]\nsource = "texts"\n' if section != "read" else ""
    (tmp_path / "data.toml").write_text(f"{given}[{section}]\n{name} = {value}\n")
    assert run(["data", "build"]) == 2
    check_said(capsys.readouterr().err)


@pytest.mark.parametrize("setting", ["run.name", "run.dir"])
def test_a_run_folder_of_a_long_name_is_an_error(setting, tmp_path, capsys):
    write_texts(tmp_path / "texts")
    assert run(["train", *arguments(**{setting.replace(".", "__"): LONG})]) == 2
    check_said(capsys.readouterr().err)


def test_a_folder_that_may_not_be_looked_into_is_an_error(monkeypatch, capsys):
    """Root, whom tests may run as, may look into all of them."""

    def refused(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "closed/run.toml")

    monkeypatch.setattr("tilewright.cli.common.find_run", refused)
    assert run(["report", "closed"]) == 2
    said = capsys.readouterr().err
    check_said(said)
    assert "closed/run.toml" in said
    assert "Permission denied" in said
