"""Messages of the loader about a value: the schema library's findings and unknown names, in four parts each."""

import difflib
from collections.abc import Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError

from tilewright.core.config import setting_names
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.toml import toml_text
from tilewright.core.errors import LONGEST_NAME, LONGEST_PATH, Problem

_LISTS = {True: "tilewright inspect", False: "the reference of settings"}
_COMPARED, _LONGEST = 60, 200  # characters of a value: to compare it, to show it


def schema_problems(
    error: ValidationError,
    values: Mapping[str, object],
    places: Mapping[str, str],
    root: type[BaseModel] = Recipe,
) -> list[tuple[str, Problem]]:
    """Turn the schema's errors into one problem per field, whatever number of details its library found in it.

    Args:
        error: of the validation of a whole file.
        values, places: value and place of each field that was given, by `section.field`.
        root: the schema.
    """
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        loc = [str(part) for part in detail["loc"]]
        names = (".".join(loc[:end]) for end in range(2, len(loc) + 1))
        path = next((name for name in names if setting_names.find(name, root)), "")
        item = setting_names.find(path, root)
        if item is None:
            raise AssertionError(f"the schema complains about {'.'.join(loc)}, which it does not have")
        inner = loc[path.count(".") + 1 :]
        if path in found:
            continue
        what = f"{path} is not right"
        if detail["type"] == "extra_forbidden":
            what = f"unknown key {inner[-1]!r} in {path}"
        elif detail["type"] == "missing":
            what = f"{path} lacks {inner[-1]!r}"
        words = [word for word in get_args(item.info.annotation) if isinstance(word, str)]
        near = difflib.get_close_matches(_start(values[path]), words, n=1)
        likely = near[0] if near else item.info.default
        try_ = "" if likely in ((), {}, "") else f"{path.rpartition('.')[2]} = {toml_text(likely)}"
        found[path] = Problem(what, toml_text(values[path]), item.wants, try_, places[path])
    return list(found.items())


def _start(value: object) -> str:
    """The beginning of a value, which is compared with known words. Comparing takes the square of the length."""
    return value[:_COMPARED] if isinstance(value, str) else ""


def broken_text(path: str, value: object, place: str) -> Problem:
    """The message about a value, a text that no file can hold and no path be."""
    got = ascii(value)
    return Problem(
        f"{path} is not UTF-8 text, or holds a NUL",
        got=got if len(got) <= _LONGEST else f"{got[:_LONGEST]}...",
        need="text in UTF-8",
        try_="a link of another name to it, where it is a path",
        where=place,
    )


def long_path(path: str, value: object, place: str) -> Problem:
    """The message about a value, a path at which no file can be."""
    return Problem(
        f"{path} is longer than a path can be",
        got=toml_text(value),
        need=f"a path below {LONGEST_PATH} bytes, names in it of at most {LONGEST_NAME}",
        try_="a link of a shorter name to it",
        where=place,
    )


def unknown_setting(path: str, value: object, place: str, root: type[BaseModel] = Recipe) -> Problem:
    """The message about a setting that the schema does not have, with the nearest name."""
    section, _, name = path.rpartition(".")
    if path in setting_names.sections(root):
        return not_a_section(path, value, place, root)
    near = setting_names.suggest(path, root)
    inside = setting_names.sections(root).get(section)
    if near:
        need = ""
    elif inside is not None:
        need = f"settings of [{section}]: " + ", ".join(inside.model_fields)
    else:
        need = "section.field, with a section among " + ", ".join(setting_names.sections(root))
    return Problem(
        f"Unknown setting {path}",
        got=f"{name or path} = {toml_text(value)}",
        need=need,
        try_=f"did you mean {near}?" if near else f"{_LISTS[root is Recipe]} lists all settings",
        where=place,
    )


def not_a_section(section: str, content: object, place: str, root: type[BaseModel] = Recipe) -> Problem:
    """Make the message about a top-level key of a file that is no section, or a section that is no table."""
    known = setting_names.sections(root)
    got = "" if isinstance(content, dict) else f"{section} = {toml_text(content)}"
    if section in known:
        need = f"a line [{section}] with settings below it"
        return Problem(f"{section} is a section, not a value", got=got, need=need, where=place)
    near = setting_names.suggest(section, root)
    near_section, near_name = (near, "") if near in known else near.rpartition(".")[::2]
    if near_name:
        try_ = f"put {near_name} under [{near_section}]"
    else:
        try_ = f"did you mean [{near_section}]?" if near_section else ""
    return Problem(
        f"Unknown section [{section}]" if isinstance(content, dict) else f"{section} is outside any section",
        got=got,
        need="" if try_ else "sections: " + ", ".join(known),
        try_=try_,
        where=place,
    )


def by_line(problem: Problem) -> tuple[str, int]:
    """Sort key of a message about a value, that is about a recipe file, by line; the others come after, in the order
    found."""
    file, _, number = problem.where.rpartition(":")
    return (file, int(number)) if file.endswith(".toml") and number.isdecimal() else ("~", 0)
