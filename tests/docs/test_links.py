"""Links of README and docs lead somewhere: to a file of the repository, and to a heading where they name one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
    if "_build" not in path.parts
)
LINK = re.compile(r"\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Targets of the links that stay within the repository; code is not searched."""
    return [link for link in LINK.findall(CODE.sub("", text)) if "://" not in link and not link.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and myst make them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub(lambda found: found[0].strip("`"), page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in links(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not broken(page)


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](page.md#a-title) [b](#none) [c](gone.md) `[d](x)`\n\n```py\n[e](y)\n```\n")
    assert broken(page) == ["#none", "gone.md"]


BUILT = [path for path in PAGES if ROOT / "docs" in path.parents]


def test_the_index_lists_every_page():
    """A page that it does not list is a warning of Sphinx, and `make docs` takes warnings as errors."""
    trees = re.findall(r"^```{toctree}$(.*?)^```$", (ROOT / "docs/index.md").read_text(), re.MULTILINE | re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = [path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in BUILT]
    assert sorted(listed) == sorted(set(pages) - {"index"})


@pytest.mark.parametrize("page", BUILT, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_link_to_what_sphinx_takes(page):
    """Pages of the docs, and files elsewhere that are neither Markdown nor folders: others are warnings as well."""
    names = {link: link.partition("#")[0] for link in links(page.read_text(encoding="utf-8"))}
    targets = {link: (page.parent / name).resolve() for link, name in names.items() if name}
    outside = {link: path for link, path in targets.items() if ROOT / "docs" not in path.parents}
    assert not [link for link, path in outside.items() if path.is_dir() or path.suffix == ".md"]


def test_pages_have_one_naming_style():
    names = [path.stem for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    assert not [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)]


def test_the_root_of_the_docs_has_the_index_and_no_how_to():
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {"index.md", "log.md", "benchmarks.md"}


def named(text: str) -> list[str]:
    """Paths of the repository that are in code marks; patterns and names to be filled in are left out."""
    found = re.findall(r"`((?:src|tests|benchmarks|docs|tools)/[\w./-]+)`", text)
    return [path for path in found if "NAME" not in path and "_build" not in path]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_pages_name_are_there(page):
    if page.name not in ("CHANGELOG.md", "log.md"):  # history keeps the names of its time
        assert not [path for path in named(page.read_text(encoding="utf-8")) if not (ROOT / path).exists()]


def test_pages_for_developers_name_files():
    for name in ("add-an-op", "add-a-model", "add-a-format", "add-a-command"):
        assert len(named((ROOT / "docs" / "how-to" / f"{name}.md").read_text(encoding="utf-8"))) >= 4, name
