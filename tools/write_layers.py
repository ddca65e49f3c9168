"""Writes the layers into docs/explanation/how-tilewright-is-built.md (the contracts on imports in pyproject.toml), and
into how-tos what a way of spreading a model over processes is refused with.

`make reference` after a change of a contract; a test holds the committed page equal to what this writes.
"""

import tomllib
from pathlib import Path

from tilewright.core.config.sections.expert_conflicts import REFUSED_WITH_EXPERTS
from tilewright.core.config.sections.stage_conflicts import REFUSED_WITH_STAGES
from tilewright.core.config.sections.tensor_conflicts import REFUSED_WITH_TENSORS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "how-tilewright-is-built.md"
BEGIN, END = "<!-- layers -->\n", "<!-- /layers -->"
PREFIX = "tilewright."
REFUSED = {
    "pipelines": ("parallel.pp", REFUSED_WITH_STAGES),
    "expert-parallelism": ("parallel.ep", REFUSED_WITH_EXPERTS),
    "tensor-parallelism": ("parallel.tp", REFUSED_WITH_TENSORS),
}
"""By page of the how-tos."""


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


def how_to(name: str) -> Path:
    """A page of the how-tos."""
    return ROOT / "docs" / "how-to" / f"{name}.md"


def with_refused(name: str, text: str) -> str:
    """A how-to's text with its list made again, a line for each setting."""
    setting, rows = REFUSED[name]
    fields: dict[tuple[str, str], list[str]] = {}
    for _, field, what, need, _ in rows:
        fields.setdefault((what, need), []).append(f"`{field}`")
    lines = [f"- {what} ({', '.join(names)}): {need}" for (what, need), names in fields.items()]
    begin, end = f"<!-- refused: {setting} -->\n", "<!-- /refused -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{name}.md has no block between {begin.strip()} and {end}")
    return "\n".join([f"{before}{begin}", *lines, "", f"{end}{after}"])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name in REFUSED:
        how_to(name).write_text(with_refused(name, how_to(name).read_text(encoding="utf-8")), encoding="utf-8")
