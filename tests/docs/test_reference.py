"""The committed reference pages are what the code says, and what commands print is what pages show."""

import importlib.util
import re
from pathlib import Path

import pytest

import tilewright

ROOT = Path(__file__).resolve().parents[2]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer, outputs = tool("write_reference"), tool("write_outputs")


@pytest.mark.parametrize("name", writer.PAGES)
def test_page_is_up_to_date(name):
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert committed == writer.PAGES[name](), "run `make reference`"


def test_the_page_of_python_has_the_public_names():
    listed = [name for names in writer.PUBLIC.values() for name in names]
    assert sorted([*listed, "__version__"]) == sorted(tilewright.__all__)
    for name in listed:
        found = getattr(tilewright, name)
        assert found.__doc__, name
        assert getattr(importlib.import_module(found.__module__), name) is found


def test_there_is_a_page_with_printed_output():
    assert [path.name for path in outputs.pages()] == ["several-processes.md", "will-it-fit.md"]


@pytest.mark.parametrize("path", list(outputs.pages()), ids=lambda path: path.name)
def test_printed_output_is_up_to_date(path):
    committed = path.read_text(encoding="utf-8")
    assert committed == outputs.made(committed), "run `make reference`"


def test_the_drawing_is_up_to_date():
    flow = tool("write_flow")
    assert flow.PICTURE.read_text(encoding="utf-8") == flow.picture(), "run `make reference`"
    ends = {name for pair in flow.ARROWS for name in pair}
    assert ends == set(flow.BOXES), "each box is reached"


def test_the_layers_are_those_of_the_contracts():
    layers = tool("write_layers")
    committed = layers.PAGE.read_text(encoding="utf-8")
    assert committed == layers.page(committed), "run `make reference`"
    for package in (ROOT / "src" / "tilewright").iterdir():
        if package.is_dir() and any(package.glob("*.py")) and package.name != "recipes":
            assert re.search(rf"^(.*\| )?{package.name}( \|.*)?$", layers.layers(), re.MULTILINE), package.name


@pytest.mark.parametrize("name", ["pipelines", "expert-parallelism", "tensor-parallelism"])
def test_a_how_to_lists_what_is_refused(name):
    layers = tool("write_layers")
    committed = layers.how_to(name).read_text(encoding="utf-8")
    assert committed == layers.with_refused(name, committed), "run `make reference`"
    for _, field, *_ in layers.REFUSED[name][1]:
        assert field in committed


def test_the_support_matrix_is_up_to_date():
    support = tool("write_ranks_support")
    found = support.marks()
    assert support.PAGE.read_text(encoding="utf-8") == support.page(found), "run `make reference`"
    for mark in found:
        assert (mark.feature, mark.mesh) not in support.NOT_THERE, mark.test
    unmarked = {key for features in support.FEATURES.values() for key in features} - {mark.feature for mark in found}
    assert not unmarked, "a row without a test"


def test_a_mark_that_is_in_no_row_or_contradicts_another_is_an_error(tmp_path):
    support = tool("write_ranks_support")
    for text in ('@pytest.mark.support("nothing", "copies")', '@pytest.mark.support("muon", "everywhere")'):
        (tmp_path / "test_x.py").write_text(f"{text}\ndef test_it(): ...\n")
        with pytest.raises(ValueError, match=r"test_x.py::test_it"):
            support.marks(tmp_path)
    works, refused = (support.Mark("muon", "copies", refused, "test_x.py::test_it") for refused in (False, True))
    assert "| Muon | untested | refused [1] |" in support.page([refused])
    with pytest.raises(ValueError, match="works and is refused"):
        support.page([works, refused])


def test_the_tree_has_every_folder_in_two_levels_with_a_line():
    page = (ROOT / "docs" / "explanation" / "how-tilewright-is-built.md").read_text(encoding="utf-8")
    tree = page.partition("<!-- tree -->")[2].partition("<!-- /tree -->")[0]
    listed, package = set(), ""
    for indent, name in re.findall(r"^( {2}|    )(\w+)/ +\S", tree, re.MULTILINE):
        package = package if len(indent) == 4 else name
        listed.add(name if len(indent) == 2 else f"{package}/{name}")
    source = ROOT / "src" / "tilewright"
    there = [path.relative_to(source) for path in source.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    assert listed == {str(path) for path in there if len(path.parts) <= 2}
