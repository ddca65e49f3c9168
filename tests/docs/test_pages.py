"""README and docs run: Python blocks, quick console blocks and recipes in TOML blocks, each page in an empty folder."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from tests.commands import workers_from_fork_server
from tilewright.cli.app import run
from tilewright.core.config.load import load_recipe
from tilewright.data.engine.build_settings import load_data_toml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if "_build" not in path.parts)


def run_console(example: Example) -> None:
    """Every `$ tilewright ...` line ends well; `|| true` allows an error that is reported in four parts (exit 2)."""
    for line in str(example.parsed).splitlines():
        if not line.startswith("$ "):
            continue
        command, _, allowed = line.removeprefix("$ ").partition("||")
        program, *arguments = shlex.split(command, comments=True)
        assert program in ("tilewright", "tw"), f"{line}: only our own commands run here; put a skip before the block"
        code = run(arguments)
        assert code == (2 if allowed.strip() == "true" else 0), f"{line} ended with {code}"


def load_toml(example: Example) -> None:
    """A TOML block with `extends` is a whole recipe, and loads without a setting that has no effect. One that begins
    with `# data.toml` is the file of that name, for the commands after it."""
    text = str(example.parsed)
    if text.startswith("# data.toml"):
        Path("data.toml").write_text(text, encoding="utf-8")
        load_data_toml(Path("data.toml"))
        return
    if "extends" in tomllib.loads(text):
        path = Path("block.toml")
        path.write_text(text, encoding="utf-8")
        loaded = load_recipe(path, environ={})
        assert loaded.notes == ()


def write_module(example: Example) -> None:
    """A Python block that begins with `# NAME.py` is the file of that name, too."""
    text = str(example.parsed)
    if named := re.match(r"# (\w+\.py)\n", text):
        Path(named[1]).write_text(text, encoding="utf-8")


PARSERS = [
    PythonCodeBlockParser(),
    CodeBlockParser("console", run_console),
    CodeBlockParser("toml", load_toml),
    SkipParser(),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workers_from_fork_server(monkeypatch)
    document = Document.parse(str(page), *PARSERS, encoding="utf-8")
    for example in document.examples():
        write_module(example)
        example.evaluate()
