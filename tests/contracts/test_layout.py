"""House rules that a machine can check: layers, file length, docstrings, one reader of the environment."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.contracts.syntax import statements

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "tilewright").rglob("*.py"))
MAX_LINES, MAX_TEST_LINES, MAX_ENTRIES = 400, 500, 13


@pytest.fixture(scope="module")
def trees():
    """Every module of the package, parsed: a second and more each time."""
    return {path: ast.parse(path.read_text()) for path in SOURCES}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_arrows_go_down_only():
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_no_file_is_too_long():
    limits = dict.fromkeys(SOURCES, MAX_LINES)
    limits |= {path: MAX_TEST_LINES for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    counts = {path: len(path.read_text().splitlines()) for path in limits}
    long = {name(path): count for path, count in counts.items() if count > limits[path]}
    assert not long, f"files over their limit: {long}"


def test_no_folder_is_too_full():
    """The package's own folder is left out: it has one entry per layer of the design."""
    package = ROOT / "src" / "tilewright"
    folders = sorted({path.parent for path in SOURCES} - {package})
    counts = {name(folder): sum(_has_files(path) for path in folder.iterdir()) for folder in folders}
    assert len(folders) > 40
    full = {folder: count for folder, count in counts.items() if count > MAX_ENTRIES}
    assert not full, f"folders with over {MAX_ENTRIES} entries: {full}"


def _has_files(entry: Path) -> bool:
    """A folder that was moved leaves what was compiled of it."""
    return entry.is_file() or any(path.suffix != ".pyc" for path in entry.rglob("*") if path.is_file())


def test_every_module_says_what_it_is(trees):
    silent = [name(path) for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert not silent, f"no module docstring: {silent}"


def test_only_core_env_reads_the_environment():
    pattern = re.compile(r"os\.environ|os\.getenv|\benviron\[")
    readers = [name(path) for path in SOURCES if pattern.search(path.read_text())]
    assert readers == ["src/tilewright/core/env.py"]


def test_no_test_on_class_names():
    pattern = re.compile(r"__name__\s*(==|!=|in\b)|in type\(.*\)\.__name__")
    found = [
        f"{name(path)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if pattern.search(line) and '__name__ == "__main__"' not in line
    ]
    assert not found


def test_types_are_read_from_modules_of_transformers():
    """Its package names all models for types: one import of it has pyright read 2,600 more files, 10 s of a core."""
    pattern = re.compile(r"^ *(from transformers import|import transformers\b)", re.MULTILINE)
    assert [name(path) for path in SOURCES if pattern.search(path.read_text())] == []


def test_packaged_files_are_in_the_wheel_list():
    """Everything in the package that is not Python must be named in pyproject, or an install lacks it."""
    import tomllib

    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tilewright"]
    package = ROOT / "src" / "tilewright"
    listed = {path for pattern in patterns for path in package.glob(pattern)}
    others = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert others == listed & others


def test_no_class_name_is_in_two_files(trees):
    """A name means one thing. Private names are left out: they are read beside their definition."""
    found: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name(path))
    assert len(found) > 200
    twice = {one: files for one, files in found.items() if len(files) > 1}
    assert not twice


def test_not_implemented_is_an_abstract_method(trees):
    """What a user meets is an error in four parts, and what a caller of ours catches another class."""
    bad = []
    for path, tree in trees.items():
        methods = [item for node in statements(tree) if isinstance(node, ast.ClassDef) for item in node.body]
        abstract = {id(item.body[-1]) for item in methods if isinstance(item, ast.FunctionDef) and len(item.body) <= 2}
        for node in statements(tree):
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node) and id(node) not in abstract:
                bad.append(f"{name(path)}:{node.lineno}")
    assert not bad, f"no abstract method: {bad}"


def test_every_folder_of_tests_is_collected(pytestconfig):
    """pytest leaves folders out by their names; one called `build` was never run."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    parts = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    skipped = sorted(part for part in parts if any(fnmatch(part, pattern) for pattern in left_out))
    assert not skipped, f"pytest never enters these folders (norecursedirs): {skipped}"
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]
