"""Modules import each other in one direction, imports inside functions and for type checkers counted too."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tilewright
from tests.contracts.syntax import statements

ROOT = Path(tilewright.__file__).parent


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports, anywhere in its file."""
    files = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        named: set[str] = set()
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                below = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= (below & files.keys()) or {node.module}
        found[name] = (named & files.keys()) - {name}
    return found


def ordered(graph: dict[str, set[str]]) -> None:
    """Raise AssertionError with the modules of a circle, where there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from error


def test_no_circles():
    graph = imports()
    assert len(graph) > 250
    ordered(graph)


def test_a_circle_is_found():
    graph = {name: set(named) for name, named in imports().items()}
    assert "tilewright.models.decoder.hf_weights" in graph["tilewright.models.decoder.decoder"]
    graph["tilewright.models.decoder.hf_weights"].add("tilewright.models.decoder.decoder")
    with pytest.raises(AssertionError, match="hf_weights"):
        ordered(graph)
