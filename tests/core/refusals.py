"""What cannot be with a way to spread a model over ranks: refused by its name, with a change that is accepted."""

import shlex
from collections.abc import Mapping

import pytest

from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError


def load(way: Mapping[str, str], settings: Mapping[str, str]) -> Recipe:
    """The recipe of a way with more settings."""
    return load_recipe(None, {**way, **settings}, environ={}).recipe


def check_accepted(way: Mapping[str, str], settings: Mapping[str, str], try_: str) -> None:
    """The recipe is loaded with the first change that an error names."""
    words = shlex.split(try_.split(", or ")[0].split(": ")[0])
    load(way, {**settings, **{words[at].removeprefix("--"): words[at + 1] for at in range(0, len(words), 2)}})


def check_refused(way: Mapping[str, str], settings: Mapping[str, str], field: str, title: str, said: str) -> None:
    """The error has a problem of this title that names the field and the way, and its first change helps."""
    with pytest.raises(ConfigError, match=title) as caught:
        load(way, settings)
    problem = next(one for one in caught.value.problems if title in one.what and field in one.got)
    assert said in problem.got
    check_accepted(way, settings, problem.try_)


def check_numbers(way: Mapping[str, str], settings: Mapping[str, str], what: str, words: str, helps: bool) -> None:
    """Numbers that do not fit: a problem says which do, and its first change `helps`."""
    with pytest.raises(ConfigError) as caught:
        load(way, settings)
    problem = next(one for one in caught.value.problems if what in f"{one.what} {one.where}")
    assert words in f"{problem.got} {problem.need}"
    if helps:
        check_accepted(way, settings, problem.try_)
