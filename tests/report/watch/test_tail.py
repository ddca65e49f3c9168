"""The reader of growing files against `json` on the whole file, for any bytes in any pieces."""

import json
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.report.watch.tail_jsonl import MAX_LINE_BYTES, JsonTail

ROWS = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.floats() | st.text(max_size=9), max_size=3)
LINES = ROWS.map(lambda row: json.dumps(row).encode()) | st.binary(max_size=30).filter(lambda line: b"\n" not in line)
FILES = st.lists(LINES, max_size=8).map(b"\n".join) | st.binary(max_size=60)


def whole(data: bytes) -> list[dict]:
    """The objects of the lines that end in a line feed, read by `json` at once."""
    rows = []
    for line in data.split(b"\n")[:-1]:
        try:
            row = json.loads(line.decode("utf-8", errors="replace"))
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def same(one: list[dict], other: list[dict]) -> bool:
    return [repr(row) for row in one] == [repr(row) for row in other]  # NaN equals itself


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=FILES, cuts=st.lists(st.integers(0, 400), max_size=6))
def test_any_bytes_in_any_pieces(tmp_path, data, cuts):
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    tail, rows, bad = JsonTail(path), [], 0
    places = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    for start, end in zip([0, *places], places, strict=False):
        with open(path, "ab") as file:
            file.write(data[start:end])
        found = tail.read()
        assert not found.restarted
        rows += found.rows
        bad += found.bad
    assert same(rows, whole(data))
    complete = [line for line in data.split(b"\n")[:-1] if line.strip()]
    assert len(rows) + bad == len(complete)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=FILES, after=FILES, how=st.sampled_from(["replace", "truncate", "remove"]))
def test_a_restart_is_read_from_the_start(tmp_path, before, after, how):
    """However a file was changed, what the reader holds is what a reader of the new file alone would."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    tail = JsonTail(path)
    rows = tail.read().rows
    if how == "replace":
        fresh = path.with_name("fresh")
        fresh.write_bytes(after)
        os.replace(fresh, path)
    elif how == "truncate":
        path.write_bytes(after)
    else:
        path.unlink()
        gone = tail.read()
        assert gone.restarted == bool(before)
        rows = []
        path.write_bytes(after)
    found = tail.read()
    rows = found.rows if found.restarted else rows + found.rows
    assert same(rows, whole(after))


def test_a_missing_file_is_empty(tmp_path):
    tail = JsonTail(tmp_path / "none" / "metrics.jsonl")
    assert tail.read().rows == []
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert tail.read().rows == [{"step": 1}]


def test_only_new_bytes_are_read(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' * 10_000)
    tail = JsonTail(path)
    assert len(tail.read().rows) == 10_000
    taken = []
    take = tail._take
    monkeypatch.setattr(tail, "_take", lambda chunk, found: (taken.append(len(chunk)), take(chunk, found)))
    with open(path, "ab") as file:
        file.write(b'{"step": 2}\n')
    assert len(tail.read().rows) == 1
    assert taken == [12]


def test_a_line_without_end_takes_no_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * (MAX_LINE_BYTES + 10) + b'\n{"step": 1}\n')
    found = JsonTail(path).read()
    assert (found.rows, found.bad) == ([{"step": 1}], 1)


def test_brackets_nested_by_the_thousand_are_a_bad_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"[" * 200_000 + b'\n{"step": 1}\n')
    found = JsonTail(path).read()
    assert (found.rows, found.bad) == ([{"step": 1}], 1)
