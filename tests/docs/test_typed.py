"""Options and settings that pages tell the user to type are there, also in blocks that no test runs."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click

from tilewright.cli.app import COMMANDS, cli
from tilewright.core.config import setting_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if "_build" not in path.parts and path.name != "log.md"
)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
CALL = re.compile(r"(?:\btilewright|\btw) ([a-z]+)(?: ([a-z]+)\b)?([^`|;\n]*)")


@cache
def options() -> dict[str, frozenset[str]]:
    """Options by command; those of a group's commands by both names."""
    found = {}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {inner}": one for inner, one in command.commands.items()}
    return {
        name: frozenset(text for one in command.params for text in (*one.opts, *one.secondary_opts)) | {"--help"}
        for name, command in found.items()
    }


@cache
def settings_of_recipes() -> frozenset[str]:
    return frozenset(item.path for item in setting_names.fields())


def is_typed(option: str, taken: frozenset[str]) -> bool:
    """True if the option is one of these, or a setting of a recipe."""
    name = option.rstrip(".")
    return name in taken or ("." in name and name.removeprefix("--") in settings_of_recipes())


def calls(text: str) -> Iterator[tuple[str, str]]:
    """The commands that a text has, each with the rest of its line."""
    for first, second, rest in CALL.findall(text):
        both = f"{first} {second}"
        name, left = (both, rest) if both in options() else (first, f"{second}{rest}")
        if name in options():
            yield name, left


def wrong(text: str) -> list[str]:
    """Options that the command on their line does not take."""
    text = text.replace("\\\n", " ")
    return [
        f"{name}: {option}"
        for name, rest in calls(text)
        for option in OPTION.findall(rest)
        if not is_typed(option, options()[name])
    ]


def code_of(page: str) -> str:
    """Lines of blocks, and inline code, a line each."""
    blocks = re.findall(r"^```(?:console|bash|sh|toml)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", page)])


def test_commands_of_pages_take_the_options_that_they_have():
    bad = [f"{path.name}: {text}" for path in PAGES for text in wrong(code_of(path.read_text(encoding="utf-8")))]
    assert not bad, "\n".join(bad)


def test_an_option_that_is_not_there_is_found():
    text = "tilewright plan default --on h100 --train.steps 4 --fast\ntilewright data build x.toml --out a --run b"
    assert wrong(text) == ["plan: --fast", "data build: --run"]
