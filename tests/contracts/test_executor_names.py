"""Executors are told apart by what they can do: no name of one is compared outside of the module that names them."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from tilewright.core.config.executors import CAPABILITIES, ExecutorName, capabilities_of
from tilewright.core.config.recipe import Recipe

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tilewright"
NAMES = "core/config/executors.py"


def comparisons(text: str) -> list[str]:
    """Where a source text compares an executor's name, or tests its class, one line each."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(value for case in node.cases for value in ast.walk(case.pattern))]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            sides = [node.args[1]] if "Executor" in ast.unparse(node.args[1]) else []
        else:
            continue
        if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
            continue  # whether there is one, whichever it is
        parts = [part for side in sides for part in getattr(side, "elts", [side])]
        if any(_names_one(part) for part in parts):
            found.append(f"{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


def _names_one(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in CAPABILITIES
    return (isinstance(node, ast.Attribute) and node.attr == "executor") or (
        isinstance(node, ast.Name) and node.id.endswith("Executor")
    )


@pytest.mark.parametrize(
    "text",
    [
        'recipe.memory.executor == "standard"',
        'x = "layer_major" != name',
        'name in ("standard", "other")',
        "one.executor is two.executor",
        "isinstance(executor, LayerMajorExecutor)",
        'match name:\n    case "standard":\n        pass',
        "match memory.executor:\n    case _:\n        pass",
    ],
)
def test_a_comparison_is_found(text):
    assert comparisons(text)


@pytest.mark.parametrize(
    "text",
    [
        "recipe.memory.can.shard",
        'settings["memory.executor"] = "standard"',
        'executor != "rank"',
        "fixed.executor is None",
    ],
)
def test_what_compares_no_executor_is_not_found(text):
    assert not comparisons(text)


def test_no_name_of_an_executor_is_compared():
    files = {str(path.relative_to(SOURCE)): path for path in SOURCE.rglob("*.py")}
    found = {
        name: lines
        for name, path in sorted(files.items())
        if name != NAMES and (lines := comparisons(path.read_text()))
    }
    assert not found, "ask for a capability (core.config.executors): " + repr(found)


def test_each_name_has_its_capabilities():
    assert set(get_args(ExecutorName)) == set(CAPABILITIES)
    for name in CAPABILITIES:
        memory = Recipe().memory.model_copy(update={"executor": name})
        assert memory.can is capabilities_of(name)


def test_two_executors_differ_in_what_they_can_do():
    kinds = list(CAPABILITIES.values())
    assert all(kinds.count(kind) == 1 for kind in kinds)
