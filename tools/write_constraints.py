"""Writes constraints.txt: the installed versions of everything that .[hf,dev] needs, and nothing else.

Run inside the environment that the tests passed in: `make constraints`.
"""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = {"hf", "dev"}
# What torch brings for a GPU is pinned by torch itself, and differs between its builds.
UNPINNED = ("nvidia-", "triton", "cuda-")
HEADER = "# Exact versions that tilewright is tested with; written by `make constraints`.\n"


def needed(name: str, extras: set[str], found: dict[str, set[str]]) -> None:
    """Adds a package and what it needs, by normalised name, to `found`."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found and extras <= found[key]:
        return
    found[key] = found.get(key, set()) | extras
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return
    for line in lines:
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in found[key] | {""}]
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            needed(requirement.name, set(requirement.extras), found)


def main() -> None:
    found: dict[str, set[str]] = {}
    needed("tilewright", EXTRAS, found)
    names = sorted(name for name in found if name != "tilewright" and not name.startswith(UNPINNED))
    # A local build label (2.13.0+cpu) is left out: the constraint then fits every build of that version.
    lines = [f"{name}=={version(name).partition('+')[0]}\n" for name in names]
    Path("constraints.txt").write_text(HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
