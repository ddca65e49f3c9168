"""From files, environment and command line to one typed recipe, with the source of every value.

Precedence: command line > environment > file > `extends` parent > default. Values are typed strictly
(the text "7" is not the integer 7, except on the command line and in the environment, where everything
is text). Everything that is wrong is reported at once, with file and line where there is one.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tomlkit
from pydantic import ValidationError

from tilewright.core import env
from tilewright.core.atomic_io import write_whole
from tilewright.core.config import setting_names
from tilewright.core.config.conflicts import conflicts
from tilewright.core.config.recipe import Recipe, TrainSection
from tilewright.core.config.section import is_too_long
from tilewright.core.config.toml import NONE, RECIPES, RESOLVED, TomlFile, find_recipe, inline, read_toml, toml_text
from tilewright.core.config.unused_settings import without_effect
from tilewright.core.config.value_messages import (
    broken_text,
    by_line,
    long_path,
    not_a_section,
    schema_problems,
    unknown_setting,
)
from tilewright.core.errors import ConfigError, Problem, printable

CLI = "cli"
DEFAULT = "default"
_LARGEST_BITS = 1000


@dataclass(frozen=True)
class Loaded:
    """A recipe and where its values come from."""

    recipe: Recipe
    sources: dict[str, str]
    """`section.field` -> "cli", "env NAME", "file x.toml", "extends y.toml" or "default"; every field is there."""
    name: str
    """Stem of the file; of a run folder's run.toml the folder's name; "default" without a file."""
    path: Path | None = None
    notes: tuple[str, ...] = ()
    """Settings that a user wrote down but that have no effect in this recipe, one sentence each."""


@dataclass
class _Values:
    """Values by field while they are collected, lowest precedence first, and the problems on the way."""

    values: dict[str, object] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def put(self, path: str, value: object, source: str, place: str) -> None:
        self.values.pop(path, None)  # so that the last value put is the last in order
        self.values[path], self.sources[path], self.places[path] = value, source, place


def load_recipe(
    path: str | Path | None,
    overrides: Mapping[str, str] | Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Load a recipe: reads, merges and checks it.

    Args:
        path: a TOML file, the name of a shipped recipe, or None for the defaults of the schema alone.
        overrides: `{"train.steps": "10"}`, or arguments as typed: `["--train.steps", "10", "--run.seed=3"]`.
        environ: the environment; None reads that of the process.

    Raises:
        ConfigError: everything that is wrong with file, parents, environment and overrides, in one error.

    Example:
        >>> loaded = load_recipe(None, {"train.steps": "10"}, environ={})
        >>> loaded.recipe.train.steps, loaded.sources["train.steps"], loaded.sources["train.global_batch_size"]
        (10, 'cli', 'default')
    """
    merged = _Values()
    # A parent's setting may be void in the child, and a resolved recipe lists the void ones too; only what this user
    # wrote deserves a word.
    by_others: tuple[str, ...] = ("extends ",)
    file = None if path is None else find_recipe(path)
    if file is not None:
        chain = _chain(file)
        by_others += ("file ",) if chain[0].is_resolved else ()
        for depth, toml in reversed(list(enumerate(chain))):
            _put_file(merged, toml, f"{'extends' if depth else 'file'} {printable(toml.path.name)}")
    settings, problems = env.settings(environ)
    merged.problems += problems
    for setting in settings:
        path = setting_names.from_environment(setting.field)
        _put_text(merged, path, setting.value, f"env {setting.name}", f"environment variable {setting.name}")
    pairs, problems = _pairs(overrides)
    merged.problems += problems
    for name, text in pairs:
        _put_text(merged, name, text, CLI, f"--{name} on the command line")
    _follow_batch(merged)
    _follow_length(merged)
    recipe = _validated(merged)
    sources = {item.path: merged.sources.get(item.path, DEFAULT) for item in setting_names.fields()}
    void = without_effect(recipe)
    notes = [
        f"{name} has no effect here: {why} ({merged.places[name]})"
        for name, why in void.items()
        if name in merged.values and not merged.sources[name].startswith(by_others)
    ]
    return Loaded(recipe, sources, _name(file), file, tuple(notes))


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes that can be loaded."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def write_run_toml(loaded: Loaded, path: str | Path) -> None:
    """Writes the resolved recipe, each value with a comment that names its source. It loads to the same `Recipe`.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    by_section: dict[str, list[str]] = {section: [] for section in setting_names.sections()}
    for setting, value in setting_names.flat(loaded.recipe.model_dump(mode="json")).items():
        section, _, name = setting.rpartition(".")
        item = tomlkit.item(inline(NONE if value is None else value))
        by_section[section].append(f"{name} = {item.as_string()} # {loaded.sources[setting]}")
    # A document of tomlkit's would look for the place of each line among those that it has: half of the time.
    tables = (f"\n[{section}]\n" + "".join(f"{line}\n" for line in lines) for section, lines in by_section.items())
    first = f"{RESOLVED}{loaded.name!r}; the comment of a value is where it came from.\n"
    write_whole(Path(path), first + "".join(tables))


def _follow_batch(merged: _Values) -> None:
    """When loading, a micro-batch that a less specific source gave is no larger than the batch that a more specific one
    asks for."""
    batch, micro = "train.global_batch_size", "train.micro_batch_size"
    wanted, given = merged.values.get(batch), merged.values.get(micro, TrainSection().micro_batch_size)
    if type(wanted) is not int or type(given) is not int or not 1 <= wanted < given:
        return
    if micro in merged.values:
        order, level = list(merged.values), [_level(merged.sources[path]) for path in (batch, micro)]
        if level[0] == level[1] or order.index(micro) > order.index(batch):
            return  # written down together, or later: a conflict
    merged.put(micro, wanted, f"follows {batch}", merged.places[batch])


def _follow_length(merged: _Values) -> None:
    """Keep the steps or the minutes of a loaded recipe, whichever the more specific source sets; the other one becomes
    0. From one source both stay."""
    steps, minutes = "train.steps", "train.minutes"
    given = [path for path in merged.values if path in (steps, minutes)]  # the last one is the most specific
    if not given or not _is_above_0(merged.values[given[-1]]):
        return
    other = minutes if given[-1] == steps else steps
    if other not in given:
        if other == minutes:
            return  # which is 0 by default
    elif _level(merged.sources[other]) == _level(merged.sources[given[-1]]):
        return
    merged.put(other, 0, f"follows {given[-1]}", merged.places[given[-1]])


def _is_above_0(value: object) -> bool:
    """True if a loaded value of any type is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _level(source: str) -> str:
    """Common source of two settings of a loaded recipe that were written together: one file, the environment, one
    command."""
    return "env" if source.startswith("env ") else source


def _name(file: Path | None) -> str:
    if file is None:
        return DEFAULT
    return file.resolve().parent.name if file.name == "run.toml" else file.stem


def _chain(file: Path) -> list[TomlFile]:
    """List a file and the files that it extends: its parent, its parent's parent, ..."""
    chain = [read_toml(file)]
    while setting_names.EXTENDS in chain[-1].data:
        child = chain[-1]
        name = child.data[setting_names.EXTENDS]
        where = child.place(setting_names.EXTENDS)
        if not isinstance(name, str):
            raise ConfigError(
                "`extends` is not the name of one recipe", got=toml_text(name), need="a text in quotes", where=where
            )
        parent = find_recipe(name, folder=child.path.parent, where=where)
        if parent.resolve() in [toml.path.resolve() for toml in chain]:
            circle = " -> ".join([*(toml.path.name for toml in chain), parent.name])
            raise ConfigError(
                "Recipes extend each other in a circle",
                got=circle,
                need="a chain that ends",
                try_=f"take `extends` out of {child.path.name}",
                where=where,
            )
        chain.append(read_toml(parent))
    return chain


def _put_file(merged: _Values, toml: TomlFile, source: str) -> None:
    known = setting_names.sections()
    for section, content in toml.data.items():
        if section == setting_names.EXTENDS:
            continue
        if not isinstance(content, dict) or section not in known:
            merged.problems.append(not_a_section(section, content, toml.place(section)))
        else:
            _put_section(merged, toml, section, content, source)


def _put_section(merged: _Values, toml: TomlFile, section: str, content: Mapping[str, object], source: str) -> None:
    for name, value in content.items():
        path = f"{section}.{name}"
        item = setting_names.find(path)
        if path in setting_names.sections() and isinstance(value, dict):
            _put_section(merged, toml, path, value, source)
            continue
        if item is not None and item.may_be_none and value == NONE:
            value = None
        merged.put(path, value, source, toml.place(path))


def _put_text(merged: _Values, path: str, value: object, source: str, place: str) -> None:
    item = setting_names.find(path)
    merged.put(path, _typed(item, value) if item and isinstance(value, str) else value, source, place)


def _typed(item: setting_names.Field, text: str) -> object:
    """Text from a command line loaded as a TOML value; where it is none, or a text is wanted, the text itself."""
    if item.may_be_none and text == NONE:
        return None
    if item.is_bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, a number of thousands of digits, or brackets nested too deep
        return text
    return text if item.is_text and not isinstance(value, str) else value


def _pairs(overrides: Mapping[str, str] | Sequence[str]) -> tuple[list[tuple[str, str]], list[Problem]]:
    """Overrides to load as (section.field, text) pairs."""
    if isinstance(overrides, Mapping):
        return [(name.removeprefix("--"), str(text)) for name, text in overrides.items()], []
    # `--name=value` and `--name value` mean the same; a value that begins with -- needs the first form.
    pairs: list[tuple[str, str]] = []
    problems: list[Problem] = []
    rest = list(overrides)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") and not equals:
            problems.append(
                Problem("Argument is not a setting", got=argument, need="--section.field value", where="arguments")
            )
        elif equals:
            pairs.append((name, text))
        elif rest and not rest[0].startswith("--"):
            pairs.append((name, rest.pop(0)))
        else:
            # Only without a value: names that have one are checked together with the file's.
            item = setting_names.find(name)
            near = "" if item else setting_names.suggest(name)
            problems.append(
                Problem(
                    f"--{name} has no value" if item else f"Unknown option --{name}",
                    need=item.wants if item else "",
                    try_=f"--{near} VALUE" if near else f"--{name} VALUE" if item else "tilewright inspect",
                    where="command line",
                )
            )
    return pairs, problems


def _validated(merged: _Values) -> Recipe:
    """The loaded recipe, validated, or one ConfigError with every problem."""
    # 1. Names and broken texts, for which the schema has worse words.
    bad: set[str] = set()
    known: dict[str, object] = {}
    for path, value in merged.values.items():
        if setting_names.find(path) is None:
            merged.problems.append(unknown_setting(path, value, merged.places[path]))
            bad.add(path)
        elif _is_broken(value):
            merged.problems.append(broken_text(path, value, merged.places[path]))
            bad.add(path)
        elif _is_too_long(path, value):
            merged.problems.append(long_path(path, value, merged.places[path]))
            bad.add(path)
        else:
            known[path] = _absolute(path, value)
    # 2. Types and bounds. Bad values are taken out, so that what contradicts among the others is reported too.
    try:
        recipe = _strict(known)
    except ValidationError as error:
        for path, problem in schema_problems(error, merged.values, merged.places):
            merged.problems.append(problem)
            bad.add(path)
            del known[path]
        recipe = _strict(known)
    # 3. Contradictions, unless one of their fields is wrong already.
    for conflict in conflicts(recipe):
        if not bad.intersection(conflict.fields):
            where = ", ".join(dict.fromkeys(merged.places[path] for path in conflict.fields if path in merged.places))
            merged.problems.append(Problem(conflict.what, conflict.got, conflict.need, conflict.try_, where))
    if merged.problems:
        raise ConfigError.from_problems(sorted(merged.problems, key=by_line))
    return recipe


def _absolute(path: str, value: object) -> object:
    """A loaded value with the paths in it absolute, where its setting may name some."""
    item = setting_names.find(path)
    place = item.place if item is not None else None
    if place is None:
        return value
    if isinstance(value, dict):
        return {key: place.absolute(inner) if isinstance(inner, str) else inner for key, inner in value.items()}
    return place.absolute(value) if isinstance(value, str) else value


def _is_too_long(path: str, value: object) -> bool:
    """True if a loaded value, or one in it, is longer than a path can be, where its setting names one."""
    item = setting_names.find(path)
    if item is None or item.place is None:
        return False
    texts = value.values() if isinstance(value, dict) else [value]
    return any(isinstance(text, str) and "://" not in text and is_too_long(text) for text in texts)


def _is_broken(value: object) -> bool:
    """True if a text in a loaded value is not UTF-8 (as bytes of a command line may be), or holds a NUL, which no path
    may."""
    if isinstance(value, str):
        return "\0" in value or any("\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, dict):
        return any(_is_broken(key) or _is_broken(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_is_broken, value))


def _strict(values: Mapping[str, object]) -> Recipe:
    # Through JSON because there strict means what we want: lists for tuples, but no "7" for 7 and no 1 for true.
    # Dates are the only TOML values without a JSON form; as text they are refused where no text is wanted.
    return Recipe.model_validate_json(json.dumps(_capped(setting_names.nested(values)), default=str), strict=True)


def _capped(value: object) -> object:
    """A loaded value with integers far beyond any limit as smaller ones, that can be written in decimal digits."""
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        return 2**_LARGEST_BITS if value > 0 else -(2**_LARGEST_BITS)
    if isinstance(value, dict):
        return {key: _capped(inner) for key, inner in value.items()}
    return [_capped(inner) for inner in value] if isinstance(value, list | tuple) else value
