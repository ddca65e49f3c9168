"""Recipes of every kind, sound and broken, from files, environment and command line: a recipe or one screen of errors.

Each case is a file with settings drawn from the schema, with values that fit their kind or are odd, perhaps damaged
bytes, perhaps a chain of `extends`, and the same again as flags and variables. Checked: either a ConfigError of four
parts that fits a screen, or a recipe in which every setting that was typed last has its value, which the run.toml that
it writes gives back.

python -m benchmarks.fuzz_config --cases 10000
"""

import json
import random
import tomllib
from pathlib import Path

from benchmarks.fuzz import drive
from tilewright.core.config import setting_names
from tilewright.core.config.load import load_recipe, shipped_recipes, write_run_toml
from tilewright.core.errors import MAX_LINES, ConfigError
from tilewright.core.units import parse_bytes

CLAIM = "generated configurations give a recipe with all that was typed, or one screen of errors: no traceback, no hang"
FIELDS = list(setting_names.fields())
ODD = (
    *('""', '"\\u0000"', '"\\u001b[31m"', "[]", "{}", "[[[]]]", "{a = {b = 1}}", "nan", "-inf", "1e400", "-1", "0"),
    *(
        "true",
        "1979-05-27",
        "07:32:00",
        '"auto"',
        '"none"',
        '"7"',
        "0.5",
        "-0.0",
        "1e-30",
        "['a', 1]",
        '"8GiB"',
        '"-1B"',
    ),
    *(
        str(2**31),
        str(2**63 - 1),
        str(2**63),
        "9" * 5000,
        '"' + "x" * 5000 + '"',
        "[" * 3000 + "]" * 3000,
        "'",
        "=",
        "",
    ),
)
NAMES = (
    "train.step",
    "optim.learning_rate",
    "model",
    "train",
    "nothing.here",
    "data.weights.code",
    "a.b.c.d",
    "",
    ".",
    "\u2028",
)


def sound(rng: random.Random, item: setting_names.Field) -> str:
    """A value of the setting's kind, in TOML; it may still conflict with others."""
    if item.choices:
        return json.dumps(rng.choice(item.choices))
    if item.is_bool:
        return rng.choice(["true", "false"])
    wants = item.wants
    if wants.startswith("an integer"):
        return str(rng.choice([0, 1, 2, 8, 64, 300, 512, 4096]))
    if wants.startswith("a number"):
        return rng.choice(["0.0", "0.01", "0.5", "1.0", "3", "1e-4", "100.0"])
    if item.is_text:
        return rng.choice(['""', '"auto"', '"cpu"', '"a b"', '"ünï"', '"runs"'])
    return rng.choice(["[]", '["a", "b"]', "{}", "{a = 1.0}", "0", "1", '"1MB"', "0.5", "[0.9, 0.95]"])


def settings(rng: random.Random, most: int, odd: float) -> dict[str, str]:
    """Settings by path, each in TOML, a share of them odd."""
    found = {}
    for _ in range(rng.randrange(most)):
        item = rng.choice(FIELDS)
        name = rng.choice(NAMES) if rng.random() < odd / 3 else item.path
        found[name] = rng.choice(ODD) if rng.random() < odd else sound(rng, item)
    return found


def file_text(rng: random.Random, typed: dict[str, str], extends: str) -> str:
    """A recipe's text: dotted keys, or sections."""
    lines = [f"extends = {json.dumps(extends)}"] if extends else []
    sections: dict[str, list[str]] = {}
    for path, value in typed.items():
        section, _, name = path.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {value}")
    for section, entries in sections.items():
        lines += [f"[{section}]", *entries] if section else entries
    return rng.choice(["\n", "\n", "\r\n"]).join(lines) + "\n"


def damaged(rng: random.Random, odd: float, data: bytes) -> bytes:
    """Now and then with a few other bytes, or cut off."""
    if rng.random() >= odd:
        return data
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[: rng.randrange(len(changed)) if rng.random() < 0.3 else None])


def run_case(seed: int, folder: Path) -> str:
    """Outcome of a case: "a recipe", or "error: ..." with what the first problem is about.

    Raises:
        AssertionError: a value is lost, or an error is no screen of four parts. Anything else: a bug.
    """
    rng = random.Random(seed)
    odd = rng.choice([0.0, 0.0, 0.1])
    parent, child = folder / "parent.toml", folder / "child.toml"
    shipped = rng.choice([*shipped_recipes(), "", *(["absent", "child.toml"] if odd else [])])
    parent.write_bytes(damaged(rng, odd, file_text(rng, settings(rng, 4, odd), shipped).encode()))
    in_file = settings(rng, 8, odd)
    child.write_bytes(damaged(rng, odd, file_text(rng, in_file, rng.choice(["parent.toml", shipped])).encode()))
    flags, variables = settings(rng, 4, odd), settings(rng, 3, odd)
    overrides = [part for path, value in flags.items() for part in flag(rng, path, value)]
    environ = {"TILEWRIGHT_" + path.upper().replace(".", "_"): value for path, value in variables.items()}
    try:
        loaded = load_recipe(child, overrides, environ=environ)
    except ConfigError as error:
        return "error: " + checked(error)
    values = setting_names.flat(loaded.recipe.model_dump())
    for path, value in flags.items():
        assert path in values, f"--{path} {value} was taken and is no setting"
        assert loaded.sources[path] == "cli", f"--{path} has source {loaded.sources[path]}"
    for path, value in in_file.items():
        if loaded.sources.get(path, "").startswith("file child") and not isinstance(values[path], tuple | dict):
            typed, place = tomllib.loads(f"x = {value}")["x"], setting_names.find(path).place
            typed = place.absolute(typed) if place is not None and isinstance(typed, str) else typed
            size = isinstance(typed, str) and isinstance(values[path], int)
            same = values[path] == (parse_bytes(typed) if size else typed) or str(values[path]) == str(typed)
            assert same or typed != typed, f"{path} = {value} became {values[path]!r}"
    write_run_toml(loaded, folder / "run.toml")
    again = load_recipe(folder / "run.toml", environ={}).recipe
    assert again == loaded.recipe, "run.toml gives another recipe"
    return "a recipe"


def flag(rng: random.Random, path: str, value: str) -> list[str]:
    """A setting as typed: text without its quotes, in one argument or two."""
    text = value[1:-1] if value.startswith('"') and len(value) > 1 else value
    return [f"--{path}={text}"] if rng.random() < 0.5 else [f"--{path}", text]


def checked(error: ConfigError) -> str:
    """The first problem in a few words; all of them have their parts and fit a screen."""
    said = str(error)
    assert all(
        problem.what and (problem.got or problem.where) and (problem.need or problem.try_) for problem in error.problems
    ), said
    assert len(said.splitlines()) <= MAX_LINES, said
    assert all(line.isprintable() for line in said.split("\n")), ascii(said)
    said.encode("utf-8")
    words = error.problems[0].what.split()
    return " ".join("..." if "." in word else word for word in words[:4])


if __name__ == "__main__":
    drive("benchmarks.fuzz_config", CLAIM, run_case)
