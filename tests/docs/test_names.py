"""Code that the docs name is there: settings, modules and their members. (Files are the matter of `test_links`.)"""

import importlib
import re
from pathlib import Path

import pytest

from tilewright.core.config import setting_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tilewright"
PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if "_build" not in path.parts and path.name != "log.md"
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
DOTTED = re.compile(r"(?:tilewright\.)?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
SUFFIXES = (".py", ".toml", ".json", ".jsonl", ".html", ".svg")


def is_setting(name: str) -> bool:
    """A setting, or a section of settings."""
    return any(item.path == name or item.path.startswith(name + ".") for item in setting_names.fields())


def is_code(name: str) -> bool:
    """A module of the package or a member of one, with or without `tilewright.` before it."""
    parts = name.removeprefix("tilewright.").split(".")
    for count in range(len(parts), -1, -1):
        try:
            found = importlib.import_module(".".join(["tilewright", *parts[:count]]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            fields = getattr(found, "__dataclass_fields__", {})
            if not hasattr(found, part) and part not in fields:
                return False
            found = getattr(found, part, None)
        return True
    return False


def missing(text: str) -> list[str]:
    """Names in inline code that lead nowhere."""
    found = []
    for code in INLINE.findall(FENCED.sub("", text)):
        dotted = re.match(DOTTED, code)
        if not dotted or dotted[0].endswith(SUFFIXES) or dotted[0].split(".")[0] not in {"tilewright", *FOLDERS}:
            continue
        if not (is_setting(dotted[0]) or is_code(dotted[0])):
            found.append(code)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_there(page):
    assert not missing(page.read_text(encoding="utf-8"))


def test_a_name_that_is_not_there_is_found():
    text = "`precision.mode` `precision.model` `formats.spec.E4M3` `tilewright.formats.nothing` `x.y` `report.html`"
    assert missing(text) == ["precision.model", "tilewright.formats.nothing"]
