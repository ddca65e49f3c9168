"""README is short, names recipes that are there, and its first screen says where tilewright has run.

Its commands and code run in `test_pages`, its links are followed in `test_links`, and its numbers are compared with the
committed results in `tests/benchmarks/test_pages.py`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCREEN = 40
"""Lines of the first screen."""


def test_it_is_read_in_minutes():
    lines = len(README.splitlines())
    assert lines <= 200, f"{lines} lines of README, 200 wanted"


def test_the_first_screen_says_what_where_and_how():
    screen = "\n".join(README.splitlines()[:SCREEN])
    for told in (
        "pip install .",
        "tilewright train",
        "make train",
        "make test",
        "tilewright finetune ",
        "tilewright chat",
        "tilewright serve",
        "bits per byte",
        "It has not been run on a GPU yet",
    ):
        assert told in screen, told
    assert re.search(r"!\[[^]]+\]\(docs/images/report\.png\)", screen)


def test_commands_name_shipped_recipes():
    named = set(re.findall(r"\$ tilewright (?:plan|train) (\w+)(?![\w/-])", README))  # `org/name` is a model of the hub
    named |= set(re.findall(r"recipe `(\w+)`", README))
    assert named
    assert named <= {path.stem for path in (ROOT / "src" / "tilewright" / "recipes").glob("*.toml")}
