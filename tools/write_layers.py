"""Writes the layers into docs/explanation/how-tilewright-is-built.md: the contracts on imports in pyproject.toml.

`make reference` after a change of a contract; a test holds the committed page equal to what this writes.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "how-tilewright-is-built.md"
BEGIN, END = "<!-- layers -->\n", "<!-- /layers -->"
PREFIX = "tilewright."


def layers(settings: Path = ROOT / "pyproject.toml") -> str:
    """The block: packages from the top down, then the folders inside each, and who may not import what."""
    contracts = tomllib.loads(settings.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    ordered = [one for one in contracts if one["type"] == "layers"]
    whole = [one for one in ordered if "containers" not in one]
    if len(whole) != 1 or any(len(one["containers"]) != 1 for one in ordered if "containers" in one):
        raise ValueError("this page needs one contract on all packages, and one container in each of the others")
    lines = [
        "```text",
        *(name.replace(PREFIX, "") for name in whole[0]["layers"]),
        "```",
        "",
        "Inside of packages, from the top down:",
        "",
    ]
    for one in ordered:
        if "containers" in one:
            (package,) = (name.removeprefix(PREFIX) for name in one["containers"])
            order = ", then ".join(f"`{name}`" for name in one["layers"])
            lines.append(f"- `{package}`: {order}")
    for one in contracts:
        if one["type"] == "forbidden":
            sources = ", ".join(f"`{name.removeprefix(PREFIX)}`" for name in one["source_modules"])
            without = ", ".join(f"`{name.removeprefix(PREFIX)}`" for name in one["forbidden_modules"])
            lines += ["", f"Not imported by {sources}: {without}."]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page's text with the block made again."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE.name} has no block between {BEGIN.strip()} and {END}")
    return f"{before}{BEGIN}\n{layers()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
