"""README names what is there: packages, files to read, and no number without a committed result."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_file_tree_lists_every_package_with_a_line():
    listed = re.findall(r"^  (\w+)/ +\S", README, re.MULTILINE)
    package = ROOT / "src" / "tilewright"
    assert set(listed) == {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}


def test_links_into_the_repository_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    # The picture is of a run, and is made after the code that it shows.
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists() and not link.endswith(".png")]
    assert not missing


def test_the_ladder_stands_between_its_markers():
    table = README.split("<!-- ladder:")[1].split("<!-- /ladder -->")[0]
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert bool(re.search(r"^\|", table, re.MULTILINE)) <= bool(results)
