"""Builds of conversations: the ids and masks of `data.format = "chat"`, the same reasons, and nothing that is cut."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.build.corpora import build, build_as_ranks, digest, settings
from tests.data.build.test_incremental import stages_run_alone
from tests.data.chat.families import make_folder
from tests.data.chat.test_chat_rows import talks
from tests.draws import examples
from tilewright.cli.app import run
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError, DataError
from tilewright.data.common.records import Record
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_settings import DataBuild, load_data_toml
from tilewright.data.engine.record_tables import record_of, rows
from tilewright.data.engine.unit_folders import fingerprint_of
from tilewright.data.prepare import prepare
from tilewright.data.stages.all_stages import STAGES

WORDS = [
    "river",
    "stone",
    "light",
    "paper",
    "seven",
    "under",
    "morning",
    "field",
    "how",
    "far",
    "is",
    "it",
    "yes",
    "no",
]
ALL = {"duplicates": {"exact": False, "near": False}}
BAD = {
    "no answer of the assistant": {"messages": [{"role": "user", "content": "hi"}]},
    "no known shape": {"text": "hello"},
    "tools that are not descriptions of functions": {"prompt": "a", "completion": "b", "tools": [{"x": 1}]},
    "name of role 'user' that the template leaves out": {
        "messages": [{"role": "user", "content": "hello", "name": "Zeb"}, {"role": "assistant", "content": "you"}]
    },
}


def _say(rng: random.Random, number: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(3, 40))) + f" {number}"


def talk(number: int) -> dict:
    """A row in one of the shapes, some with a thought, or with an answer that is not trained."""
    rng = random.Random(number)
    messages = [{"role": "system", "content": _say(rng, number)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        answer = {"role": "assistant", "content": _say(rng, number)}
        answer |= {"reasoning_content": _say(rng, number)} if rng.random() < 0.3 else {}
        messages += [{"role": "user", "content": _say(rng, number)}, answer]
    if number % 4 == 1:
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}
    if number % 4 == 2:
        return {"instruction": _say(rng, number), "input": "", "output": _say(rng, number), "source": "somewhere"}
    if number % 4 == 3 and len(messages) > 3:
        messages[-3]["weight"] = 0  # an answer before the last
    return {"messages": messages}


def pair(number: int) -> dict:
    """A row of preferences."""
    rng = random.Random(number)
    return {"prompt": _say(rng, number), "chosen": _say(rng, number), "rejected": _say(rng, number)}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), "qwen3")


def write(folder: Path, found: list[dict], domain: str = "talks") -> Path:
    """Half of the rows as lines of JSON, half as a table."""
    (folder / domain).mkdir(parents=True)
    lines = [json.dumps(row) + "\n" for row in found[::2]]
    (folder / domain / "a.jsonl").write_text("".join(lines))
    fields = dict.fromkeys(name for row in found[1::2] for name in row)
    table = [{name: row.get(name) for name in fields} for row in found[1::2]]
    pq.write_table(pa.Table.from_pylist(table), folder / domain / "b.parquet")
    return folder


def chat_settings(source: Path, model: Path, form: str = "chat", **more: dict) -> DataBuild:
    return settings(source, chat={"format": form}, tokenizer={"path": str(model)}, **more)


def renderings(tokens: Path) -> list[tuple[list[int], list[int]]]:
    """Ids and mask of every rendering in a folder of token streams, sorted."""
    found = []
    table = pq.read_table(tokens / "documents.parquet", columns=["split", "length"]).to_pylist()
    for split in ("train", "holdout"):
        streams = [np.load(tokens / f"{split}{end}.npy").tolist() for end in ("", ".trained")]
        at = 0
        for row in (row for row in table if row["split"] == split):
            found.append(tuple(stream[at : at + row["length"]] for stream in streams))
            at += row["length"]
        assert at == len(streams[0])
    return sorted(found)


@pytest.mark.parametrize("form", ["chat", "preferences"])
def test_ids_masks_and_reasons_are_those_of_the_other_road(model, tmp_path, form):
    make = talk if form == "chat" else pair
    source = write(tmp_path / "in", [make(i) for i in range(40)])
    (source / "talks" / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in BAD.values()))
    how = {"format": form, "cache_dir": str(tmp_path / "cache"), "seq_len": 512}
    other = prepare(str(source), model_folder=str(model), tokenizer=str(model), holdout=0.1, **how)
    build(chat_settings(source, model, form, split={"holdout": 0.1}, **ALL), tmp_path / "out")
    found = prepare(str(tmp_path / "out"), model_folder=str(model), tokenizer=str(model), **how)
    assert renderings(tmp_path / "out" / "tokens") == renderings(other.tokenizer_folder.parent)
    assert found.pairs == (form == "preferences")
    assert found.stop_ids == other.stop_ids
    for name in ("docs", "tokens", "trained_tokens", "vocab_size"):
        assert found.summary[name] == other.summary[name], name
    ours, theirs = found.summary["chat"], other.summary["chat"]
    for name in ("shapes", "template", "not_read", "rendered_again", "saved_tokens"):
        assert ours[name] == theirs[name], name
    assert 0 < found.summary["domains"]["talks"]["holdout_docs"] < 20
    assert _reasons(found.summary) == _reasons(other.summary)
    assert "[[" in "\n".join(found.preview())
    batch = found.eval_batches("talks", 2, 1)[0]
    assert (batch["labels"] >= 0).any()


@given(drawn=st.lists(talks(), min_size=4, max_size=10))
@examples(6)
def test_any_rows_are_those_of_the_other_road(model, tmp_path_factory, drawn):
    """With calls of tools, thoughts, weights and names; whatever the template refuses, both refuse by the same name."""
    folder = tmp_path_factory.mktemp("drawn")
    found = [talk(i) for i in range(6)]
    for number, (messages, tools) in enumerate(drawn):
        last = next(message for message in reversed(messages) if message["role"] == "user")
        last["content"] += f" number {number}"  # so that none is a copy
        found.append({"messages": messages, "tools": tools})
    (folder / "in" / "talks").mkdir(parents=True)
    (folder / "in" / "talks" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    how = {"format": "chat", "cache_dir": str(folder / "cache"), "seq_len": 4096}
    other = prepare(str(folder / "in"), model_folder=str(model), tokenizer=str(model), holdout=0.1, **how)
    build(chat_settings(folder / "in", model, split={"holdout": 0.1}, **ALL), folder / "out")
    ours = prepare(str(folder / "out"), **how)
    assert renderings(folder / "out" / "tokens") == renderings(other.tokenizer_folder.parent)
    assert _reasons(ours.summary) == _reasons(other.summary)


def _reasons(summary: dict) -> dict[str, int]:
    return {reason: one["documents"] for reason, one in summary["refused"].items() if one["documents"]}


def test_processes_ranks_and_a_second_build_give_the_same_bytes(model, tmp_path):
    source = write(tmp_path / "in", [talk(i) for i in range(16)])
    config = chat_settings(source, model)
    first = build(config, tmp_path / "one")
    build_as_ranks(config, tmp_path / "ranks")
    assert digest(tmp_path / "one") == digest(tmp_path / "ranks")
    assert build(config, tmp_path / "one")["units"] == {"made": 0, "finished before": first["units"]["made"]}
    ran = stages_run_alone(config, tmp_path / "alone", tmp_path)
    assert {"template", "render", "read", "split", "dataset"} <= set(ran)
    assert not {"encode", "encoder", "shards"} & set(ran)


def test_a_dataset_of_text_becomes_one_of_conversations_and_text_again(model, tmp_path):
    """In one folder, what is left of the one is not in the other."""
    source = write(tmp_path / "in", [talk(i) | {"text": _say(random.Random(-i), i)} for i in range(16)])
    text, talks = settings(source), chat_settings(source, model)
    fresh = {}
    for name, config in (("text", text), ("talks", talks)):
        build(config, tmp_path / name)
        fresh[name] = digest(tmp_path / name)
    for name, config in (("talks", talks), ("text", text)):
        build(config, tmp_path / "text")
        assert digest(tmp_path / "text") == fresh[name]


def test_settings_of_conversations_at_their_default_are_in_no_fingerprint(tmp_path):
    """So that datasets which were built before there were any stay finished."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    context = Context(settings(tmp_path / "in"), tmp_path / "out")
    [read] = [stage for stage in STAGES if stage.name == "read"]
    values = {name: _value(context.build, name) for name in read.settings}
    listed = {"files": context.listing.keys(0)}
    assert read.fingerprint(context, 0) == fingerprint_of(["read", read.version, values, listed])


def _value(build: DataBuild, name: str) -> object:
    section, _, setting = name.partition(".")
    values = getattr(build, section).model_dump(mode="json")
    return values[setting] if setting else values


@pytest.mark.parametrize("near", [True, False])
def test_copies_are_of_whole_conversations_and_rules_look_at_what_is_said(model, tmp_path, near):
    """Conversations that say the same stay beside each other where anything else in them differs, as in a recipe."""
    user, answer = ({"role": role, "content": f"{role} {_say(random.Random(7), 7)}"} for role in ("user", "assistant"))
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "the river"}}}
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    kept = [
        {"messages": [user, answer]},
        {"messages": [{"role": "system", "content": "Be kind."}, user, answer]},
        {"messages": [{"role": "system", "content": "Be brief."}, user, answer]},
        {"messages": [user, answer], "tools": [tool]},
        {"messages": [user, answer | {"weight": 0}, user, answer]},
        {"messages": [user, answer, user, answer]},
        {"messages": [user, answer | {"tool_calls": [call]}], "tools": [tool]},
    ]
    again = [{"messages": kept[1]["messages"]}, {"prompt": user["content"], "completion": answer["content"]}]
    short = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "in" / "talks").mkdir(parents=True)
    path = tmp_path / "in" / "talks" / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *again, short, *map(talk, range(30))]))
    config = chat_settings(tmp_path / "in", model, rules={"min_words": 6}, duplicates={"near": near, "threshold": 1})
    build(config, tmp_path / "out")
    refused = json.loads((tmp_path / "out" / "dataset.json").read_bytes())["summary"]["refused"]
    assert {reason: found["documents"] for reason, found in refused.items()} == {"min_words": 1, "exact duplicate": 2}
    recipe = prepare(str(path.parent), format="chat", tokenizer=str(model), cache_dir=str(tmp_path / "cache"))
    assert recipe.summary["refused"]["exact duplicate"]["documents"] == 2
    [first, *_] = [record_of(row) for row in rows(tmp_path / "out" / "work" / "read" / "00000" / "records.parquet")]
    assert isinstance(first, Record)
    assert first.text == f"{user['content']}\n{answer['content']}"
    assert json.loads(first.facts["conversation"]) == kept[0]


def test_a_near_copy_says_other_words(model, tmp_path):
    """Of talks that differ in case and spaces alone one stays; under another system message both do, if words are the
    same."""
    one = {"prompt": _say(random.Random(3), 3) + " and so on", "completion": _say(random.Random(4), 4)}
    like = {**one, "prompt": one["prompt"].upper().replace(" ", "  ")}
    (tmp_path / "in" / "talks").mkdir(parents=True)
    found = [one, like, {**one, "system": "Be kind."}, *map(talk, range(30))]
    (tmp_path / "in" / "talks" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    build(chat_settings(tmp_path / "in", model, duplicates={"keep": "first"}), tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / "tokens" / "documents.parquet").to_pylist()
    refused = json.loads((tmp_path / "out" / "dataset.json").read_bytes())["summary"]["refused"]
    assert {reason: entry["documents"] for reason, entry in refused.items()} == {"near-copy": 1}
    assert len({row["document"] for row in table}) == 32
    shared = Counter(row["cluster"] for row in table).most_common(1)[0][0]
    assert len({row["split"] for row in table if row["cluster"] == shared}) == 1


def test_what_cannot_be_is_refused_in_four_parts(model, tmp_path):
    path = tmp_path / "data.toml"
    head = 'read.source = "in"\nchat.format = "chat"\n'
    for setting, value in (("repair.mask", '["email"]'), ("repair.repeated_lines", "3"), ("chunk.tokens", "64")):
        path.write_text(f"{head}{setting} = {value}\n")
        with pytest.raises(ConfigError, match=r"Conversations are not (repaired|cut into windows)") as caught:
            load_data_toml(path)
        path.write_text(f"{head}{setting.partition('.')[0]}.{caught.value.problems[0].try_}\n")
        load_data_toml(path)
    path.write_text('chat.format = "chat"\n')
    with pytest.raises(ConfigError, match="Installed text holds no conversations") as caught:
        load_data_toml(path)
    path.write_text(f'chat.format = "chat"\n{caught.value.problems[0].try_}\n')
    load_data_toml(path)
    source = write(tmp_path / "in", [talk(i) for i in range(20)])
    bare = make_folder(tmp_path / "bare", "qwen3", template=False)
    with pytest.raises(ConfigError, match="No chat template") as caught:
        build(chat_settings(source, bare), tmp_path / "none")
    assert caught.value.problems[0].where == "chat.template"
    (tmp_path / "broken.jinja").write_text("{% if %}")
    config = settings(source, chat={"format": "chat", "template": str(tmp_path / "broken.jinja")})
    with pytest.raises(DataError, match="Chat template is not valid jinja") as caught:
        build(config, tmp_path / "none")
    assert caught.value.problems[0].try_.startswith("chat.template = ")
    with pytest.raises(DataError, match=r"No usable pair of preferences in the data(.|\n)*where  .*in\n") as caught:
        build(chat_settings(source, model, "preferences"), tmp_path / "pairs")
    assert "row without chosen and rejected" in caught.value.problems[0].got


def test_a_run_says_what_a_built_dataset_is_not(model, tmp_path):
    source = write(tmp_path / "in", [talk(i) for i in range(20)])
    bare = make_folder(tmp_path / "bare", "qwen3", template=False)
    config = settings(source, chat={"format": "chat", "template": "chatml"}, tokenizer={"path": str(bare)})
    build(config, tmp_path / "out")
    out, how = str(tmp_path / "out"), {"cache_dir": str(tmp_path / "cache"), "seq_len": 512}
    for other in ("text", "preferences"):
        with pytest.raises(DataError, match="holds rows of another format"):
            prepare(out, format=other, **how)
    with pytest.raises(DataError, match="another chat template"):
        prepare(out, format="chat", model_folder=str(model), **how)
    for same in ({"model_folder": str(model), "chat_template": "chatml"}, {"model_folder": str(bare)}, {}):
        assert prepare(out, format="chat", **same, **how).domains == ("talks",)
    with pytest.raises(DataError, match="some of: talks"):
        prepare(out, format="chat", domains=("none",), **how)


def test_domains_of_a_dataset_are_chosen(model, tmp_path):
    source = write(tmp_path / "in", [talk(i) for i in range(20)])
    write(source, [talk(i) for i in range(100, 130)], "more")
    build(chat_settings(source, model, **ALL), tmp_path / "out")
    how = {"format": "chat", "cache_dir": str(tmp_path / "cache"), "seq_len": 512}
    both = prepare(str(tmp_path / "out"), **how)
    one = prepare(str(tmp_path / "out"), domains=("talks",), **how)
    assert (both.domains, one.domains) == (("more", "talks"), ("talks",))
    assert list(one.summary["domains"]) == ["talks"]
    assert one.num_rows["talks"] == both.num_rows["talks"]


def test_commands_show_it_and_the_one_that_trains_on_it_is_printed(model, tmp_path, capsys):
    write(tmp_path / "in", [talk(i) for i in range(12)])
    path = tmp_path / "data.toml"
    path.write_text(f'read.source = "in"\nchat.format = "chat"\ntokenizer.path = "{model}"\n')
    assert run(["data", "build", str(path), "--out", str(tmp_path / "out"), "--processes", "1"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command == f"tilewright train --data.source {tmp_path / 'out'} --data.format chat"
    assert load_recipe(None, command.split()[2:], environ={}).recipe.data.format == "chat"
    assert run(["data", "inspect", str(tmp_path / "out")]) == 0
    assert "(conversations)" in capsys.readouterr().out
    assert run(["data", "inspect", str(tmp_path / "out"), "--record", "a.jsonl"]) == 0
    assert 'facts: {"conversation"' in capsys.readouterr().out


def test_a_change_of_the_template_renders_again_and_reads_nothing(model, tmp_path):
    source, work = write(tmp_path / "in", [talk(i) for i in range(12)]), tmp_path / "out" / "work"
    build(chat_settings(source, model), tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in work.rglob("receipt.json")}
    other = settings(source, chat={"format": "chat", "template": "chatml"}, tokenizer={"path": str(model)})
    build(other, tmp_path / "out")
    made = {p.relative_to(work).parts[0] for p in work.rglob("receipt.json") if before.get(p) != p.stat().st_mtime_ns}
    assert made == {"template", "render", "dataset"}
