"""Recipe files on disk: finding one, reading it, the line on which each setting stands, and values as text.

The standard parser gives values without positions, so a small scan of the text finds the lines; it
serves messages only, and a place it cannot find is the file's name alone.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomlkit

from tilewright.core.config.section import is_too_long
from tilewright.core.errors import LONGEST_NAME, LONGEST_PATH, ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
"""Folder of the recipes shipped in the package."""

NONE = "none"
"""How a recipe writes 'no value' for a setting that may have none; TOML has no null."""

RESOLVED = "# Resolved recipe "
"""How a recipe begins that the program wrote with all of its settings."""

_SHORT_TEXT, _SHORT_LIST = 400, 20  # characters and entries of a value in a message
_HEADER = re.compile(r"\s*\[\[?\s*([A-Za-z0-9_.\"'-]+)\s*\]\]?\s*(#.*)?\Z")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=")


@dataclass(frozen=True)
class TomlFile:
    """A parsed recipe file. `lines` maps `section` and `section.field` to line numbers from 1."""

    path: Path
    data: dict[str, object]
    lines: dict[str, int]
    is_resolved: bool = False
    """A run wrote it, with a value for every setting, not a user with some."""

    def place(self, key: str) -> str:
        """Place in a TOML file: `file:line` of a key, or of the section around it, or the file."""
        line = self.lines.get(key)
        while line is None and "." in key:
            key = key.rpartition(".")[0]
            line = self.lines.get(key)
        return f"{self.path}:{line}" if line else str(self.path)


def find_recipe(name: str | Path, *, folder: Path | None = None, where: str = "") -> Path:
    """Find the TOML file of a recipe by path or by the name of a shipped one; a file of that name comes first.

    Args:
        name: path, or a name such as `default` or `default.toml`.
        folder: what a relative path is relative to; None: the working directory.
        where: place that names it, for the message.

    Raises:
        ConfigError: there is no such file and no such recipe.
    """
    path = Path(name) if folder is None else folder / name
    shipped = RECIPES / f"{str(name).removesuffix('.toml')}.toml"
    _check_name(name, where)
    if path.is_file():
        return path
    if Path(name).name == str(name) and shipped.is_file():
        return shipped
    names = sorted(recipe.stem for recipe in RECIPES.glob("*.toml"))
    here = sorted(str(file) for file in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(name), [*here, *names], n=1, cutoff=0.5)
    raise ConfigError(
        "No such recipe" if not path.is_dir() else "Recipe is a file, not a folder",
        got=str(name),
        need=f"a TOML file, or a shipped recipe: {', '.join(names)}",
        try_=f"did you mean {near[0]}?" if near else "tilewright init, which writes a recipe here",
        where=where,
    )


def _check_name(name: str | Path, where: str) -> None:
    """Raises ConfigError where no TOML file can have this name."""
    if "\0" in str(name) or is_too_long(str(name)):
        raise ConfigError(
            "No such recipe",
            got=str(name)[:80],
            need=f"a path without NUL, below {LONGEST_PATH} bytes, names in it of at most {LONGEST_NAME}",
            try_="tilewright init, which writes a recipe here",
            where=where,
        )


def read_toml(path: Path) -> TomlFile:
    """Read a recipe file in TOML, with the line of each setting.

    Raises:
        ConfigError: it cannot be read, is no UTF-8 text, or is no TOML; with the line where there is one.
    """
    try:
        # "utf-8-sig" drops the byte order mark that editors on Windows write.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            "Recipe cannot be read", got=str(error.strerror), need="a readable file", where=str(path)
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            "Recipe is not UTF-8 text",
            got=f"byte {error.object[error.start]:#04x} at position {error.start}",
            need="a TOML file in UTF-8",
            try_="save it again as UTF-8 in the editor",
            where=str(path),
        ) from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, error) from error
    # Errors of tomllib that are no TOMLDecodeError.
    except (RecursionError, ValueError) as error:
        deep = isinstance(error, RecursionError)
        raise ConfigError(
            "Recipe is not valid TOML",
            got="brackets nested too deep" if deep else "a number of thousands of digits",
            need="lists of texts and tables of numbers" if deep else "numbers of at most 4300 digits",
            where=str(path),
        ) from None
    return TomlFile(path, data, _find_lines(text), text.startswith(RESOLVED))


def _syntax_error(path: Path, text: str, error: tomllib.TOMLDecodeError) -> ConfigError:
    message = str(error)
    match = re.search(r"\(at line (\d+), column (\d+)\)", message)
    number = int(match[1]) if match else len(text.splitlines())
    lines = text.splitlines()
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    bare = re.match(r"([A-Za-z0-9_.-]+)\s*=\s*([A-Za-z][^\"'#]*)", line)
    return ConfigError(
        "Recipe is not valid TOML",
        got=line or "the end of the file",
        need=f"TOML ({message[: match.start()].strip() if match else message})",
        try_=f'{bare[1]} = "{bare[2].strip()}"'
        if bare
        else 'texts in quotes, like mode = "bf16_mixed"; lists as [1, 2]; true and false in small letters',
        where=f"{path}:{number}",
    )


def _find_lines(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header:
            prefix = _plain(header[1]) + "."
            lines.setdefault(prefix[:-1], number)
        elif key:
            lines.setdefault(prefix + _plain(key[1]), number)
    return lines


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def toml_text(value: object) -> str:
    """TOML text of a value as it is in a recipe.

    Example:
        >>> toml_text((0.9, 0.95)), toml_text("cpu"), toml_text(None)
        ('[0.9, 0.95]', '"cpu"', '"none"')
    """
    if value is None:
        return f'"{NONE}"'
    return tomlkit.item(inline(_short(list(value) if isinstance(value, tuple) else value))).as_string()


def _short(value: object, depth: int = 0) -> object:
    """Shorten a TOML value to fit a line of a message: long lists, tables and texts are cut."""
    if depth > 3:
        return "..."
    if isinstance(value, str) and len(value) > _SHORT_TEXT:
        return f"{value[: _SHORT_TEXT // 2]} ... {value[-_SHORT_TEXT // 8 :]}"
    if isinstance(value, int) and value.bit_length() > _SHORT_TEXT:
        return f"an integer of about {value.bit_length() * 3 // 10} digits"
    if isinstance(value, dict):
        short = {_short(key): _short(inner, depth + 1) for key, inner in list(value.items())[:_SHORT_LIST]}
        return short if len(short) == len(value) else short | {"...": f"{len(value)} entries"}
    if isinstance(value, list):
        short = [_short(inner, depth + 1) for inner in value[:_SHORT_LIST]]
        return short if len(short) == len(value) else [*short, f"... {len(value)} entries"]
    return value


def inline(value: object) -> object:
    """A TOML value with its tables inline, so that a setting stays on its line."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update({key: inline(inner) for key, inner in value.items()})
        return table
    if isinstance(value, list):
        array = tomlkit.array()
        array.extend(inline(inner) for inner in value)
        return array
    return value
