"""A recipe's conversations and a `data build` of the same folder: the same ids, masks, reasons and copies.

Not drawn, since the roads differ by intent: text files (a recipe reads no such type, a build takes each as a row),
bytes that are no Unicode (a build guesses their encoding), and compressed files that are truncated (a build reads all
that could be unpacked, a recipe leaves out the line that is cut). Nor conversations of NULs
alone: a build takes NULs out of a row's text, which is blank then; a recipe trains on them.
"""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.data.build.corpora import build
from tests.data.build.test_chat import chat_settings, renderings, talk
from tests.data.chat.families import make_folder
from tests.data.test_recipe_and_build import refused
from tests.draws import examples
from tilewright.data.common.records import DUPLICATE, HALF_PAIR, NOTHING
from tilewright.data.dataset.prepared_images import PreparedImages
from tilewright.data.prepare import prepare

Rows = list[dict[str, Any]]

SAME = {"duplicates": {"near": False}, "split": {"holdout": 0.2}}
"""Settings of a build that does what a recipe does: only equal conversations are dropped."""
_said = st.one_of(
    st.integers(0, 5).map(lambda number: f"word {number} river"),  # few, so that some are equal
    st.sampled_from(["", " ", "\n", "one\0two", "cafe\u0301", "\ufeffone", "\u2028x", "漢字 🦊", "\ud800", "{}"]),
    st.sampled_from(
        ["one\r\ntwo\rthree", "null", "[1]", '"q"', " lead ", "<|im_end|>", "<think>a</think>b", "a" * 200]
    ),
)
_odd = st.sampled_from([None, 5, [], ["a"], {"a": 1}, [{"type": "text", "text": "part"}], [{"type": "image"}]])
_content = st.one_of(_said, _said, _odd)
_roles = st.sampled_from(["user", "assistant", "system", "tool", "developer", "robot", "", None, 3, "human", "gpt"])
_more = st.sampled_from(
    [
        {},
        {},
        {"weight": 0},
        {"weight": 1},
        {"weight": 0.5},
        {"weight": None},
        {"name": "Zeb"},
        {"reasoning_content": "a"},
    ]
)
_arguments = st.sampled_from(['{"at": "river"}', {"at": "river"}, {}, "", "{no", {"a": [1.0, None]}, {"n": 10**22}])
_tools = [{"type": "function", "function": {"name": "look", "description": "L.", "parameters": {}}}]
_fields = st.sampled_from(
    [{}, {}, {"tools": _tools}, {"tools": "[]"}, {"tools": [{"x": 1}]}, {"id": 7}, {"weight": 2}, {"label": True},
     {"system": ""}, {"system": "Be kind."}, {"chat_template_kwargs": {"enable_thinking": False}}, {"source": "\ud800"}]
)  # fmt: skip
_NAMES = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def _turn(asked: object, answer: object, more: dict[str, Any]) -> Rows:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer, **more}]


def _called(asked: str, arguments: object, result: str, answer: str) -> Rows:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [
        {"role": "user", "content": asked},
        called,
        {"role": "tool", "tool_call_id": "c1", "content": result},
        {"role": "assistant", "content": answer},
    ]


def _without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def _sharegpt(messages: Rows) -> Rows:
    return [
        {"from": _NAMES[m["role"]], "value": m["content"]} | _without(_without(m, "role"), "content") for m in messages
    ]


_turns = st.one_of(st.builds(_turn, _said, _said, _more), st.builds(_called, _said, _arguments, _said, _said))
_system = st.one_of(st.just([]), _said.map(lambda text: [{"role": "system", "content": text}]))
_talks = st.builds(
    lambda first, turns: [*first, *(message for turn in turns for message in turn)],
    _system,
    st.lists(_turns, min_size=1, max_size=2),
)
_free = st.builds(
    lambda role, content, more, gone: _without({"role": role, "content": content, **more}, gone),
    *(_roles, _content, _more, st.sampled_from(["", "", "role", "content"])),
)
_rows = st.one_of(
    st.builds(lambda messages, more: {"messages": messages, **more}, _talks, _fields),
    st.builds(lambda messages, more: {"conversations": _sharegpt(messages), **more}, _talks, _fields),
    st.builds(lambda asked, answer, more: {"prompt": asked, "completion": answer, **more}, _content, _content, _fields),
    st.builds(lambda a, b, c: {"instruction": a, "input": b, "output": c}, _said, _content, _content),
    st.lists(_free, max_size=3).map(lambda messages: {"messages": messages}),
    _talks.map(lambda messages: {"messages": json.dumps(messages)}),
    st.sampled_from([{}, {"text": "x"}, {"messages": [None]}, {"prompt": "a", "chosen": "b", "rejected": "c"}]),
)
_lines = st.one_of(
    *[_rows.map(json.dumps)] * 3,
    st.sampled_from(
        ["{no", "", "  ", "null", "[1]", '"x"', '{"messages": [', '{"prompt": "a\0b", "completion": "c"}',
         '\ufeff{"prompt": "q", "completion": "r"}', '{"prompt": "é🦊", "prompt": "漢", "completion": "c"}',
         '{"prompt": NaN, "completion": "c"}', '{"messages": ' + "[" * 3000 + "]" * 3000 + "}"]
    ),
)  # fmt: skip


def _text_of_lines(rows: list[str], end: str, again: int, encoding: str, half: bool) -> bytes:
    """Lines of JSON, some of them twice; the last may be half-written."""
    text = end.join([*rows, *rows[:again]])
    return (text[:-1] if half else text).encode(encoding)


def _table(rows: Rows) -> bytes:
    """A table with a column for each field: of lists and objects where Parquet can hold these, else of their JSON."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
            pq.write_table(pa.table({name: columns[name]}), io.BytesIO())  # an object without fields is refused here
        except (pa.ArrowException, UnicodeError, OverflowError):
            columns[name] = pa.array([json.dumps(value) for value in values], pa.string())
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=3)
    return sink.getvalue()


def _csv(rows: Rows) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)) or ["prompt"])
    writer.writeheader()
    for row in rows:
        writer.writerow({name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()})
    return out.getvalue().encode("utf-8", "replace")


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # a build names a file by its bytes: no clock in them


_jsonl = st.builds(
    _text_of_lines,
    st.lists(_lines, max_size=6),
    *(st.sampled_from(["\n", "\n", "\r\n", "\n\n", "\r"]), st.integers(0, 2)),
    *(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32"]), st.booleans()),
)
_json = st.builds(
    lambda rows, indent, encoding: json.dumps(rows, indent=indent).encode(encoding),
    st.one_of(
        st.lists(st.one_of(_rows, _rows, _odd), max_size=5), _rows, st.builds(dict, data=st.lists(_rows, max_size=3))
    ),
    *(st.sampled_from([None, 1]), st.sampled_from(["utf-8", "utf-8-sig", "utf-16"])),
)
_flat = st.lists(_rows, max_size=5)


_kinds = st.one_of(
    *[st.tuples(st.just(".jsonl"), _jsonl)] * 2,
    st.tuples(st.just(".jsonl.gz"), _jsonl.map(_gzip)),
    st.tuples(st.just(".json"), st.one_of(_json, _jsonl)),
    st.tuples(st.just(".json.gz"), _json.map(_gzip)),
    st.tuples(st.just(".csv"), _flat.map(_csv)),
    st.tuples(st.just(".parquet"), _flat.map(_table)),
    st.tuples(st.just(".bin"), st.just(bytes(range(256)))),
)
_files = st.lists(st.tuples(st.sampled_from(["a/", "b/"]), _kinds), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), "qwen3")


def _write(folder: Path, files: list[tuple[str, tuple[str, bytes]]]) -> Path:
    """The drawn files, and a good one in each domain, so that something can be trained on and held out."""
    for where, first in (("a/", 0), ("b/", 10)):
        good = "".join(json.dumps(talk(number)) + "\n" for number in range(first, first + 3))
        files = [*files, (where, (".jsonl", good.encode()))]
    for number, (where, (suffix, data)) in enumerate(files):
        path = folder / f"{where}{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def _both(model: Path, root: Path, files: list[tuple[str, tuple[str, bytes]]]) -> list[dict[str, Any]]:
    """The summaries of a build and of a recipe, whose ids and masks are the same."""
    source = _write(root / "in", files)
    how = {"holdout": 0.2, "max_bytes": 0, "seq_len": 4096, "cache_dir": str(root / "cache")}
    recipe = prepare(str(source), format="chat", model_folder=str(model), tokenizer=str(model), **how)
    built = build(chat_settings(source, model, **SAME), root / "out")["summary"]
    assert not isinstance(recipe, PreparedImages)
    assert renderings(root / "out" / "tokens") == renderings(recipe.tokenizer_folder.parent)
    return [built, recipe.summary]


def _json_of(text: str) -> bytes:
    return json.dumps({"messages": json.dumps(_turn(text, "yes", {}))}).encode()


_UNREAD = json.dumps({"prompt": "a", "completion": "b", "source": "\ud800"}).encode()
_NO_SHAPE = json.dumps({"text": "\ud800"}).encode()


@example(files=[("a/", (".jsonl", _json_of("\ud800")))])  # a build ended in a traceback
@example(files=[("a/", (".jsonl", _UNREAD)), ("b/", (".jsonl.gz", _gzip(_NO_SHAPE)))])
@example(files=[("a/", (".jsonl.gz", _gzip(b"\xef\xbb\xbf"))), ("b/", (".jsonl", b"\xef\xbb\xbf"))])
@given(files=_files)
@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_masks_reasons_and_copies_are_the_same(model, tmp_path_factory, files):
    built, recipe = _both(model, tmp_path_factory.mktemp("both"), files)
    found = [refused(summary) for summary in (built, recipe)]
    nothing = [one["documents"].pop(NOTHING, 0) for one in found]  # a build alone knows it of a compressed file
    assert found[0]["documents"] == found[1]["documents"]
    assert built["read"]["documents"]["used"] == recipe["read"]["documents"]["used"]
    totals = [one["read"]["documents"]["found"] for one in (built, recipe)]
    assert totals[0] - nothing[0] == totals[1] - nothing[1]
    assert recipe["duplicates"] == found[0]["documents"][DUPLICATE]
    for name in ("not_read", "rendered_again", "saved_tokens"):
        assert built["chat"][name] == recipe["chat"][name], name
    # Which of two equal ones stays decides which file is used.
    if DUPLICATE not in built["refused"] and not any(nothing):
        assert found[0]["files"] == found[1]["files"]
        assert built["read"]["files"]["used"] == recipe["read"]["files"]["used"]


def test_half_a_pair_is_a_reason_wherever_it_is_written(model, tmp_path):
    rows = [_json_of("\ud800"), _UNREAD, _NO_SHAPE, json.dumps({"prompt": "\ud800", "completion": "b"}).encode()]
    for summary in _both(model, tmp_path, [("a/", (".jsonl", b"\n".join(rows)))]):
        assert {reason: one["documents"] for reason, one in summary["refused"].items()} == {HALF_PAIR: 4}
