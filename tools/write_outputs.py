"""Puts what commands really print into the pages of the documentation: the block under each `<!--- made by -->`.

Only commands whose answer is the same on every machine are marked so. `make reference` after a change; a test holds the
committed pages equal to what this writes.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(
    r"<!--- made by: tilewright (?P<command>.*?) -->\n<!--- skip: next -->\n\n```console\n(?P<shown>.*?)```\n",
    re.DOTALL,
)
WIDTH = "120"


def pages() -> Iterator[Path]:
    """Pages with such a block."""
    for path in sorted(DOCS.rglob("*.md")):
        if BLOCK.search(path.read_text(encoding="utf-8")):
            yield path


def printed(command: str) -> str:
    """What the command prints on a terminal of `WIDTH` columns, without its colours."""
    done = subprocess.run(
        [sys.executable, "-m", "tilewright", *command.split()],
        env=os.environ | {"COLUMNS": WIDTH, "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def made(text: str) -> str:
    """The page's text with its blocks made again."""

    def block(found: re.Match[str]) -> str:
        command = found["command"]
        head = found[0].removesuffix(f"{found['shown']}```\n")
        return f"{head}$ tilewright {command}\n{printed(command)}```\n"

    return BLOCK.sub(block, text)


def main() -> None:
    for path in pages():
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
