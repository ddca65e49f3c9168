"""The account of a build by file: found is used and refused in each of its numbers, and each file has its reason."""

import json
import random

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from benchmarks.data.fuzz_data import make_folder, problem_of
from tests.data.build.corpora import build, prose, settings
from tests.draws import examples
from tilewright.core.errors import DataError
from tilewright.data.dataset.account import account_line

_NEAR_OFF = {"duplicates": {"near": False}}


def test_a_file_of_which_nothing_stays_has_the_reason_of_what_was_refused_in_it_first(tmp_path):
    source, rows = tmp_path / "in", [{"text": prose(i)} for i in range(3)]
    for name in ("a", "b"):
        (source / name).mkdir(parents=True)
    for i in range(12):
        (source / "a" / f"{i}.txt").write_text(prose(100 + i))
    (source / "a" / "copy.txt").write_text(prose(100))
    (source / "a" / "short.txt").write_text("three words here")
    (source / "a" / "blank.txt").write_text(" \n\n")
    (source / "a" / "x.so").write_bytes(b"\x7fELF\0\0" * 9)
    (source / "a" / "empty.txt").write_text("")
    (source / "a" / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "no row\n" * 4)
    (source / "a" / "bad.jsonl").write_text("no row\n" + json.dumps({"text": "few"}) + "\n")
    (source / "b" / "other.txt").write_text(prose(300))
    more = {"read": {"source": str(source), "domains": ("a",)}, "rules": {"min_words": 5}}
    summary = build(settings(source, **_NEAR_OFF, **more), tmp_path / "out")["summary"]
    refused = {reason: (one["files"], one["documents"]) for reason, one in summary["refused"].items()}
    assert refused == {
        "file type is not read": (1, 0),
        "not in the wanted domains": (1, 0),
        "exact duplicate": (1, 1),
        "min_words": (1, 2),
        "blank record": (1, 1),
        "empty file": (1, 0),
        "line is not JSON": (1, 5),
    }
    assert summary["file_types_not_read"] == {".so": {"files": 1, "file_bytes": 54}}
    assert summary["refused"]["line is not JSON"]["examples"] == "a/bad.jsonl, a/mixed.jsonl"
    assert summary["read"]["files"] == {"found": 20, "used": 13, "refused": 7}
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert summary["read"]["file_bytes"]["found"] == size == summary["available_bytes"]
    assert "file type is not read: .so (1 file, 54 B)" in account_line(summary, 7)


def test_a_million_bad_lines_are_one_line_of_the_list(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for i in range(12):
        (source / f"{i}.txt").write_text(prose(i))
    (source / "bad.jsonl").write_text("no row\n" * 3000)
    summary = build(settings(source, **_NEAR_OFF), tmp_path / "out")["summary"]
    listed = [json.loads(line) for line in (tmp_path / "out" / "tokens" / "rejects.jsonl").open()]
    [bad] = [one for one in listed if one["reason"] == "line is not JSON"]
    assert bad["where"] == "bad.jsonl"
    assert bad["count"] == 3000 == summary["refused"]["line is not JSON"]["documents"]


def test_what_max_bytes_leaves_out_is_counted_by_file(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for i in range(20):
        (source / f"{i:02}.txt").write_text(prose(i))
    sizes = [path.stat().st_size for path in source.iterdir()]
    read = {"source": str(source), "max_bytes": sum(sizes) // 2}
    summary = build(settings(source, **_NEAR_OFF, read=read), tmp_path / "out")["summary"]
    left = summary["refused"]["max_bytes reached"]
    assert left["files"] == 20 - summary["read"]["files"]["used"] > 5
    assert left["file_bytes"] == sum(sizes) - summary["read"]["file_bytes"]["used"]


@given(seed=st.integers(0, 10_000))
@examples(12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_of_any_folder_add_up(tmp_path_factory, seed):
    root = tmp_path_factory.mktemp("any")
    (root / "in").mkdir()
    make_folder(random.Random(seed), root / "in")
    try:
        summary = build(settings(root / "in"), root / "out")["summary"]
    except DataError:  # nothing in it can be read
        return
    assert problem_of(summary, None) is None
    account_line(summary)
