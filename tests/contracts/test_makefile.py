"""`make help` has a line for every target, and what the Makefile names is there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def make(*arguments: str) -> str:
    # Inside `make test`, make would say which folder it enters.
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_help_has_one_line_for_each_target():
    lines = make("help").splitlines()
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)
    assert [line.split()[1] for line in lines] == phony[1].split()
    assert all(re.fullmatch(r"  make [a-z-]+ +\w.{5,}", line) for line in lines)
    assert make() == make("help")


def test_quick_tests_name_folders_that_are_there():
    """A folder that was renamed would leave the inner loop without a word: pytest collects the others."""
    folders = re.search(r"^FAST := (.*)$", MAKEFILE, re.M)[1].split()
    left_out = re.search(r"^FAST_NOT := (.*)$", MAKEFILE, re.M)[1].split()
    paths = [*(f"tests/{folder}" for folder in folders), *left_out]
    assert len(folders) > 4
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize(("failed", "status"), [(0, 1), (1, 0), (5, 0), (6, 1)])
def test_few_failures_run_again(failed, status, tmp_path):
    cache = tmp_path / ".pytest_cache/v/cache/lastfailed"
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps({f"tests/test_a.py::test_{i}": True for i in range(failed)}))
    command = [sys.executable, str(ROOT / "tools" / "failed_last.py")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.count("failed beside others")) == (status, failed)


TOOLS = ("ruff", "lint-imports", "pyright", "python")
"""What `make test` starts; the last one runs the tests."""


@pytest.mark.parametrize("fails", [None, *TOOLS])
def test_make_test_fails_where_one_of_its_parts_does(fails, tmp_path):
    """Types are checked beside the tests: whichever fails, the other one runs to its end, and the whole fails."""
    said, ready = tmp_path / "said", tmp_path / "ready"
    ready.touch()  # an environment newer than its dependencies
    for name in TOOLS:
        tool = tmp_path / name
        says = f'echo {name} "$@" "[$PYTHONDONTWRITEBYTECODE]" >> {said}'
        tool.write_text(f"#!/bin/sh\n{says}\nexit {int(name == fails)}\n")
        tool.chmod(0o755)
    command = ["make", "test", f"BIN={tmp_path}", f"READY={ready}"]
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == (fails is not None), done.stderr
    ran = said.read_text().splitlines()
    started = {line.split()[0] for line in ran}
    if fails in (None, "pyright", "python"):
        assert started == set(TOOLS)
        (tests,) = [line for line in ran if line.startswith("python ")]
        assert "-m pytest" in tests
        assert tests.endswith("[]"), "what is compiled of tests and modules is kept"
    else:
        assert not started & {"pyright", "python"}, "lint fails within seconds, and nothing else begins"
