"""Processor seconds of tests: what one has spent, and sums of many."""

import json
import subprocess
import sys
from types import SimpleNamespace

from tests.seconds import SecondsPlugin, table

BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_seconds_are_those_of_the_test_and_of_what_it_started(tmp_path):
    path = tmp_path / "seconds.jsonl"
    protocol = SecondsPlugin(path).pytest_runtest_protocol(SimpleNamespace(nodeid="tests/test_a.py::test_one"))
    next(protocol)
    subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)
    list(protocol)
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert row["test"] == "tests/test_a.py::test_one"
    assert row["children"] >= 0.3
    assert 0 <= row["own"] < 0.3


def test_sums_are_by_folder_file_and_test(tmp_path):
    rows = [("tests/a/test_a.py::test_one[1]", 1.0), ("tests/a/test_a.py::test_one[2]", 2.0), ("tests/b.py::test", 0.5)]
    lines = [{"test": name, "own": seconds, "children": 0.25, "ranks": 0.0} for name, seconds in rows]
    (tmp_path / "seconds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = table(tmp_path / "seconds.jsonl")
    assert found.startswith("3 tests: own 4 s, children 1 s, ranks 0 s")
    for text in ("     3.5  tests/a\n", "     3.5  tests/a/test_a.py\n", "     2.2  tests/a/test_a.py::test_one[2]\n"):
        assert text in found
