"""The documented environment variables are those that are read."""

import re
from pathlib import Path

from tilewright.core.env import VARIABLES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "environment.md"


def test_the_page_holds_the_table():
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    expected = [
        (row.name, f"`{row.sets}`" if "." in row.sets else row.sets, row.values, row.meaning) for row in VARIABLES
    ]
    assert rows == expected
