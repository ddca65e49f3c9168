"""Conversations to rows: every shape, nothing trained but answers, nothing lost without a reason."""

import contextlib
import gzip
import json
import random
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.data.chat.families import make_folder
from tests.draws import examples
from tilewright.core.errors import DataError
from tilewright.data.batches.stream import Stream
from tilewright.data.chat.chat_rows import read_row
from tilewright.data.chat.template import ChatError, ChatTemplate
from tilewright.data.chat.trained_tokens import samples
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.prepare import prepare

WORDS = ("hello", "you", "are", "a", "system", "that", "answers", "questions", "the", "weather", "Paris", "yes", "no")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"), "llama3")


def talk(seed, turns=None):
    rng = random.Random(seed)

    def say():
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 12))) + f" {seed}"

    messages = []
    for _ in range(turns or rng.randint(1, 3)):
        messages += [{"role": "user", "content": say()}, {"role": "assistant", "content": say()}]
    return messages


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(source, model, tmp_path, **more):
    given = {"format": "chat", "model_folder": str(model), "tokenizer": str(model), "seq_len": 64, "holdout": 0.1}
    return prepare(str(source), cache_dir=str(tmp_path / "cache"), **given | more)


def all_rows(prepared):
    from tilewright.data.batches.mixture_order import Picks

    found = []
    for d, domain in enumerate(prepared.domains):
        rows = np.arange(prepared.num_rows[domain])
        zero = np.zeros_like(rows)
        found.append(prepared.train_arrays(Picks(rows, zero + d, zero, rows), 0))
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


def test_each_answer_is_trained_once_and_nothing_else(model, tmp_path):
    talks = [talk(i) for i in range(60)]
    prepared = chat(write(tmp_path / "a.jsonl", [{"messages": t} for t in talks]), model, tmp_path, seq_len=256)
    template = ChatTemplate.load(str(model), load_tokenizer(model))
    expected = sorted(
        (sample.ids_T.tolist(), sample.trained_T.tolist()) for t in talks for sample in samples(template, t)
    )
    batch = all_rows(prepared)
    held = prepared.eval_batches("chat", 4, 100)
    found = []
    for arrays in [batch, *({k: v.numpy() for k, v in b.items()} for b in held)]:
        for ids, labels, segments in zip(arrays["input_ids"], arrays["labels"], arrays["segments"], strict=True):
            for segment in range(segments.max() + 1):
                mine = segments == segment
                last = int(labels[mine][-1])  # the end-of-turn token of the last answer is always a target
                found.append(([*ids[mine].tolist(), last], [False, *(labels[mine] >= 0).tolist()]))
                assert (arrays["positions"][0] >= 0).all()
    assert sorted(found) == expected
    assert prepared.summary["docs"] == 60
    assert prepared.summary["read"]["documents"] == {"found": 60, "used": 60, "refused": 0}


SHAPES = {
    "messages": lambda t: {"messages": t},
    "ShareGPT": lambda t: {
        "conversations": [{"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in t]
    },
    "Alpaca": lambda t: {"instruction": t[0]["content"], "input": "", "output": t[1]["content"]},
    "prompt/completion": lambda t: {"prompt": t[0]["content"], "completion": t[1]["content"]},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet"])
def test_every_shape_in_every_file_gives_the_same_rows(model, tmp_path, shape, kind):
    talks = [talk(i, turns=1) for i in range(12)]
    plain = chat(write(tmp_path / "plain.jsonl", [{"messages": t} for t in talks]), model, tmp_path)
    rows = [SHAPES[shape](t) for t in talks]
    path = tmp_path / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "csv":
        import csv

        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    prepared = chat(path, model, tmp_path)
    assert prepared.summary["chat"]["shapes"] == {f"rows.{kind}": {shape: 12}}
    assert prepared.summary["tokens"] == plain.summary["tokens"]
    assert prepared.summary["trained_tokens"] == plain.summary["trained_tokens"]


def test_a_saved_dataset(model, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": talk(i, turns=1)} for i in range(12)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert chat(tmp_path / "saved", model, tmp_path).summary["docs"] == 12


def test_bad_rows_are_counted_with_their_reason(model, tmp_path):
    good = [{"messages": talk(i)} for i in range(20)]
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    bad = {
        "no answer of the assistant": {"messages": [user]},
        "roles out of order": {"messages": [user, user, answer]},
        "empty content": {"messages": [user, {"role": "assistant", "content": ""}]},
        "content that is not text": {"messages": [user, {"role": "assistant", "content": 5}]},
        "unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
        "tool_calls of role 'assistant' that the template leaves out": {
            "messages": [user, {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]
        },
        "row of preferences": {"prompt": "x", "chosen": "a", "rejected": "b"},
        "no known shape": {"text": "hello"},
        "tools that are not descriptions of functions": {"messages": [user, answer], "tools": [{"x": 1}]},
        "tools that the template leaves out": {"messages": [user, answer], "tools": [{"name": "f"}]},
        "message that is not an object": {"messages": ["hello"]},
        "answer begins behind data.seq_len": {"messages": [{**user, "content": "hello " * 400}, answer]},
    }
    prepared = chat(write(tmp_path / "a.jsonl", [*good, *bad.values()]), model, tmp_path)
    refused = prepared.summary["refused"]
    assert {reason: refused[reason]["documents"] for reason in bad} == dict.fromkeys(bad, 1)
    read = prepared.summary["read"]["documents"]
    assert read == {"found": 32, "used": 20, "refused": 12}


def test_a_long_conversation_loses_its_end_and_that_is_counted(model, tmp_path):
    long = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you are a system " * 100}]
    prepared = chat(
        write(tmp_path / "a.jsonl", [{"messages": t} for t in [*map(talk, range(20)), long]]), model, tmp_path
    )
    facts = prepared.summary["chat"]
    assert facts["truncated"] >= 1
    assert facts["truncated_tokens"] > 300
    assert facts["longest"][0]["length"] > 300
    segments = all_rows(prepared)["segments"]
    assert segments.shape[1] == 64


def test_preview_shows_what_is_trained(model, tmp_path):
    prepared = chat(write(tmp_path / "a.jsonl", [{"messages": talk(i, 1)} for i in range(20)]), model, tmp_path)
    text = "\n".join(prepared.preview())
    assert "messages (20)" in text
    assert "[[" in text
    inside = text.split("]]:")[1].split("[[")[1].split("]]")[0]
    assert inside.endswith("<|eot_id|>")
    assert "user" not in inside


def test_sources_are_domains_and_a_resume_goes_on_in_the_mixture(model, tmp_path):
    for name, seeds in (("a", range(30)), ("b", range(100, 130))):
        write(tmp_path / name / "x.jsonl", [{"messages": talk(i)} for i in seeds])
    paths = {"first": str(tmp_path / "a"), "second": str(tmp_path / "b" / "x.jsonl")}
    prepared = chat("installed", model, tmp_path, sources=paths)
    assert prepared.domains == ("first", "second")
    how = {"seed": 1, "weights": {"first": 3.0, "second": 1.0}, "batch_size": 4, "micro_batch_size": 2, "prefetch": 0}
    stream = Stream(prepared, **how)
    for _ in range(3):
        stream.next_step()
    state = stream.state_dict()
    after = stream.next_step()
    again = Stream(prepared, **how)
    again.load_state_dict(json.loads(json.dumps(state)))
    for one, other in zip(after, again.next_step(), strict=True):
        assert all((one[name] == other[name]).all() for name in one)


def test_nothing_usable_is_one_error(model, tmp_path):
    with pytest.raises(DataError, match="No usable"):
        chat(write(tmp_path / "a.jsonl", [{"text": "x"}] * 3), model, tmp_path)
    (tmp_path / "b.txt").write_text("hello")
    with pytest.raises(DataError, match="No usable"):
        chat(tmp_path / "b.txt", model, tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "text", "type", "x"]) | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
ROWS = st.dictionaries(
    st.sampled_from(
        [
            "messages",
            "conversations",
            "instruction",
            "input",
            "output",
            "prompt",
            "completion",
            "chosen",
            "rejected",
            "x",
        ]
    ),
    JSON
    | st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool", "gpt"]) | JSON, "content": JSON},
            optional={"tool_calls": JSON, "name": JSON},
        ),
        max_size=4,
    ),
    max_size=4,
)


@given(row=ROWS, pairs=st.booleans())
@examples(150)
def test_no_row_crashes_the_reader(model, row, pairs):
    template = _template(model)
    with contextlib.suppress(ChatError):
        _, read = read_row(json.loads(json.dumps(row)), pairs)
        messages = read["messages"] if not pairs else [*read["prompt"], *read["chosen"]]
        assert all(sample.trained_T.any() for sample in samples(template, messages))


_KEPT = {}


def _template(model):
    return _KEPT.setdefault(model, ChatTemplate.load(str(model), load_tokenizer(model)))


@given(rows=st.lists(ROWS | JSON, max_size=6))
@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_of_garbage_stops_the_preparation(model, tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("garbage")
    path = write(folder / "a.jsonl", [*({"messages": talk(i)} for i in range(6)), *rows])
    prepared = chat(path, model, folder, seq_len=256)
    read = prepared.summary["read"]["documents"]
    assert read["found"] == read["used"] + read["refused"]
    assert read["used"] >= 6


def test_conversations_that_are_all_alike_are_held_out_one_by_one_and_that_is_said(model, tmp_path):
    rows = [{"prompt": f"{'what is the answer of a system ' * 9} {n}?", "completion": "yes"} for n in range(40)]
    prepared = chat(write(tmp_path / "a.jsonl", rows), model, tmp_path, seq_len=256)
    assert prepared.summary["domains"]["chat"]["holdout_docs"] > 0
    assert "not independent" in prepared.summary["notes"][0]


def test_fields_that_are_not_read_are_named_with_their_rows(model, tmp_path):
    rows = [{"messages": talk(i, 1), "id": f"row-{i}", "score": i} for i in range(20)]
    for row in rows[:5]:
        row["messages"][0]["timestamp"] = "noon"
    facts = chat(write(tmp_path / "a.jsonl", rows), model, tmp_path).summary["chat"]
    assert facts["not_read"] == {"id": 20, "score": 20, "messages[].timestamp": 5}
    prepared = chat(tmp_path / "a.jsonl", model, tmp_path)
    assert "not read, by number of rows: id (20), score (20), messages[].timestamp (5)" in prepared.preview()


def test_an_answer_of_weight_0_has_no_label(model, tmp_path):
    rows = [{"messages": [{**m, "weight": 0} if i == 1 else m for i, m in enumerate(talk(n, 2))]} for n in range(20)]
    plain = chat(
        write(tmp_path / "all.jsonl", [{"messages": talk(n, 2)} for n in range(20)]), model, tmp_path, seq_len=256
    )
    some = chat(write(tmp_path / "some.jsonl", rows), model, tmp_path, seq_len=256)
    assert some.summary["tokens"] == plain.summary["tokens"]
    first = sum(
        len(_template(model).encode(talk(n, 2)[:2])) - len(_template(model).encode(talk(n, 2)[:1], True))
        for n in range(20)
    )
    assert plain.summary["trained_tokens"] - some.summary["trained_tokens"] == first


def test_pairs_that_are_equal_in_a_row_are_set_aside(model, tmp_path):
    same = "you are a system " * 40
    rows = [{"prompt": f"hello {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(20)]
    alike = [{"prompt": f"Paris {i}", "chosen": same + "yes", "rejected": same + "no"} for i in range(5)]
    late = [{"prompt": "weather " * 200, "chosen": "yes", "rejected": "no"}]
    path = write(tmp_path / "a.jsonl", rows + alike + late)
    equal, behind = "chosen and rejected are equal up to data.seq_len", "answer begins behind data.seq_len"
    for seq_len, refused in ((64, {equal: 5, behind: 1}), (1024, {})):
        prepared = chat(path, model, tmp_path, format="preferences", seq_len=seq_len)
        found = {reason: entry["documents"] for reason, entry in prepared.summary["refused"].items()}
        assert found == refused
        assert prepared.num_pairs == 26 - sum(refused.values())
        for batch in prepared.all_pairs():
            one, other = (batch["input_ids"][0, i].tolist() + batch["labels"][0, i].tolist() for i in range(2))
            assert one != other


def test_conversations_and_their_renderings_are_counted_apart(tmp_path):
    """Sixty conversations of two answers under a template that renders each apart; of thirty the second one is late."""
    folder = make_folder(tmp_path / "model", "qwen3")
    rows = []
    for i in range(60):
        second = ("you are a system " * 60) if i < 30 else "hello"
        turns = [("user", f"hello {i}"), ("assistant", f"yes {i}"), ("user", second), ("assistant", f"no {i}")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    rows.append({"messages": [{"role": "user", "content": "Paris " * 300}, {"role": "assistant", "content": "yes"}]})
    prepared = chat(write(tmp_path / "a.jsonl", rows), folder, tmp_path, seq_len=128)
    assert prepared.summary["read"]["documents"] == {"found": 61, "used": 60, "refused": 1}
    lost = prepared.summary["chat"]["lost"]["answer begins behind data.seq_len"]
    assert lost == {"rows": 31, "documents": 31, "refused": 1}
    assert any("31 of the renderings of 31 conversations are not trained" in line for line in prepared.preview())


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_fields_that_a_table_fills_up_are_not_there(tmp_path, kind):
    """A table gives all arguments the names of all calls, and all tools those of all tools."""
    folder = make_folder(tmp_path / "model", "qwen3")
    rows = []
    for i in range(20):
        names = ("city", "unit") if i % 2 else ("title",)
        call = {"function": {"name": f"f{i % 2}", "arguments": {name: f"{name} {i}" for name in names}}}
        asked = [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        properties = {name: {"type": "string"} for name in names}
        function = {"name": f"f{i % 2}", "parameters": {"type": "object", "properties": properties}}
        rows.append({"messages": asked, "tools": [{"type": "function", "function": function}]})
    plain = chat(write(tmp_path / "a.jsonl", rows), folder, tmp_path, seq_len=512)
    if kind == "saved":
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(tmp_path / "table")
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table.parquet")
    path = tmp_path / ("table" if kind == "saved" else "table.parquet")
    table = chat(path, folder, tmp_path, seq_len=512)
    assert table.summary["read"]["documents"] == plain.summary["read"]["documents"]
    for name in ("tokens", "trained_tokens"):
        assert table.summary[name] == plain.summary[name]


@pytest.fixture
def shallow():
    """Python's own limit of recursion: a compilation of torch's doubles it for the whole process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("shallow")
def test_rows_of_brackets_in_brackets_are_set_aside(model, tmp_path):
    """What JSON can hold and a recursive walk cannot."""
    nested: list = []
    talks = [{"messages": talk(i)} for i in range(20)]
    for depth in range(900):
        nested = [nested]
        if depth % 150 == 149:
            talks.append({"messages": talk(depth), "chat_template_kwargs": {"x": nested}})
    prepared = chat(write(tmp_path / "a.jsonl", talks), model, tmp_path)
    read = prepared.summary["read"]["documents"]
    assert read["found"] == 26
    assert read["used"] + read["refused"] == 26
    assert 1 <= read["refused"] <= 5
