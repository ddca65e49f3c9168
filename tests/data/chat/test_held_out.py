"""What is held out of conversations: no task as a whole without a word, nothing at all, or the user's own file."""

import random

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.data.chat.test_prepare_chat import WORDS, all_rows, chat, model, talk, write  # noqa: F401
from tests.draws import examples
from tilewright.core.errors import DataError
from tilewright.data.prepare import prepare


def instruction(rng, words):
    return " ".join(rng.choice(WORDS) + str(rng.randint(0, 99)) for _ in range(words))


def tasks(seed, num_tasks, rows_per_task, words):
    """Rows that begin with a fixed instruction each; the name of the task is in the question."""
    rng = random.Random(seed)
    rows = []
    for task in range(num_tasks):
        fixed = f"task{task}x " + instruction(rng, words)
        for number in range(rows_per_task):
            asked = f"{fixed} {instruction(rng, 6)} {number}"
            rows.append({"prompt": asked, "completion": instruction(rng, rng.randint(1, 12))})
    return rows


def texts(prepared, split):
    """The texts of a split's documents."""
    table = pq.read_table(prepared._corpus / "documents.parquet", filters=[("split", "=", split)])
    ids = np.load(prepared._corpus / f"{split}.npy")
    ends = np.cumsum(table["length"].to_numpy())
    return [prepared.tokenizer.decode(part.tolist()) for part in np.split(ids, ends[:-1])] if len(ends) else []


def trained_tasks(prepared, num_tasks):
    found = " ".join(texts(prepared, "train"))
    return {task for task in range(num_tasks) if f"task{task}x" in found}


@given(
    seed=st.integers(0, 99),
    num_tasks=st.integers(1, 4),
    rows=st.integers(30, 60),
    words=st.integers(30, 60),
    share=st.sampled_from([0.02, 0.1, 0.3]),
)
@examples(8, suppress_health_check=list(HealthCheck))
def test_every_task_is_trained_and_some_of_it_held_out(model, tmp_path_factory, seed, num_tasks, rows, words, share):  # noqa: F811
    tmp_path = tmp_path_factory.mktemp("tasks")
    source = write(tmp_path / "a.jsonl", tasks(seed, num_tasks, rows, words))
    prepared = chat(source, model, tmp_path, seq_len=1024, holdout=share)
    assert trained_tasks(prepared, num_tasks) == set(range(num_tasks))
    held = len(texts(prepared, "holdout"))
    assert 0 < held <= max(2, 1.6 * share * num_tasks * rows)
    assert any("divided inside" in note for note in prepared.summary["notes"]), prepared.summary["notes"]


def test_three_instructions_of_333_rows(model, tmp_path):  # noqa: F811
    source = write(tmp_path / "a.jsonl", tasks(5, 3, 333, 60))
    prepared = chat(source, model, tmp_path, seq_len=1024, holdout=0.02)
    held = " ".join(texts(prepared, "holdout"))
    assert 10 <= prepared.summary["domains"]["chat"]["holdout_docs"] <= 30
    assert sum(f"task{task}x" in held for task in range(3)) == 3
    assert "3 groups" in prepared.summary["notes"][0]
    assert "333, 333, 333" in prepared.summary["notes"][0]


def test_copies_inside_a_task_stay_together(model, tmp_path):  # noqa: F811
    """Each question of a task is there twice, once in capitals: both are trained, or both held out."""
    rows = tasks(7, 2, 60, 50)
    rows += [{**row, "prompt": row["prompt"].upper().replace("TASK", "task")} for row in rows]
    prepared = chat(write(tmp_path / "a.jsonl", rows), model, tmp_path, seq_len=2048, holdout=0.1)

    def lowered(split):
        return {text.lower() for text in texts(prepared, split)}

    assert lowered("holdout")
    assert not lowered("holdout") & lowered("train")


def test_a_small_group_that_is_held_out_whole_is_said(model, tmp_path):  # noqa: F811
    """Forty tasks of 2.5 % each: the one that is held out is within the share, so it is not divided."""
    prepared = chat(write(tmp_path / "a.jsonl", tasks(1, 40, 12, 50)), model, tmp_path, seq_len=1024, holdout=0.02)
    lost = set(range(40)) - trained_tasks(prepared, 40)
    said = [note for note in prepared.summary["notes"] if "none of them is trained" in note]
    assert len(said) == len(lost)


@given(seed=st.integers(0, 99), num=st.integers(12, 40), bad=st.integers(0, 5))
@examples(6, suppress_health_check=list(HealthCheck))
def test_a_trained_tokenizer_knows_no_word_that_is_held_out(tmp_path_factory, seed, num, bad):
    """Each conversation repeats two words of its own; a tokenizer that has seen them has a token for each."""
    tmp_path = tmp_path_factory.mktemp("words")
    rng = random.Random(seed)
    own = [["".join(rng.choices("bcdfghjklmnpqrstvwxz", k=9)) for _ in range(2)] for _ in range(num)]
    rows = [{"prompt": " ".join([asked] * 30), "completion": " ".join([answer] * 30)} for asked, answer in own]
    unusable = [{"messages": [{"role": "user", "content": f"only a question {i}"}]} for i in range(bad)]
    how = {"tokenizer": "", "model_folder": "", "chat_template": "chatml", "vocab_size": 4000, "seq_len": 1024}
    path = write(tmp_path / "a.jsonl", rows + unusable)
    prepared = chat(path, "", tmp_path, holdout=0.2, **how)
    held, train = (" ".join(texts(prepared, split)) for split in ("holdout", "train"))
    known = prepared.tokenizer.backend.get_vocab()
    words = {word: "\u0120" + word in known for pair in own for word in pair}
    assert any(word in held for word in words)
    assert {word for word, is_token in words.items() if is_token} == {word for word in words if word in train}
    assert prepared.summary["docs"] == num
    assert prepared.summary["read"]["documents"]["refused"] == bad


def test_the_sample_of_a_tokenizer_is_bounded_on_every_road(tmp_path, monkeypatch):
    """Text and conversations: of many texts of one size each with words of its own, no more than the bound is read."""
    monkeypatch.setattr("tilewright.data.common.tokenizer._SAMPLE_BYTES", 3000)
    own = ["".join(random.Random(i).choices("bcdfghjklmnpqrstvwxz", k=9)) for i in range(60)]
    rows = {
        "text": [{"text": " ".join([word] * 30)} for word in own],
        "chat": [{"prompt": " ".join([word] * 15), "completion": " ".join([word] * 15)} for word in own],
    }
    for form, found in rows.items():
        path = write(tmp_path / form / "a.jsonl", found)
        how = {"format": form, "chat_template": "chatml" if form == "chat" else "", "vocab_size": 4000, "seq_len": 512}
        prepared = prepare(str(path), cache_dir=str(tmp_path / "cache"), holdout=0.1, **how)
        known = prepared.tokenizer.backend.get_vocab()
        assert 9 <= sum("\u0120" + word in known for word in own) <= 11, form


def pairs(seeds):
    return [
        {"prompt": t[0]["content"], "chosen": t[1]["content"], "rejected": f"other {s}"}
        for s in seeds
        for t in [talk(s, 1)]
    ]


FORMS = {
    "chat": lambda seeds: [{"messages": talk(s)} for s in seeds],
    "preferences": pairs,
    "text": lambda seeds: [{"text": talk(s)[0]["content"] + f" and text {s}"} for s in seeds],
}


def prepared_from(path, form, model, tmp_path, **how):  # noqa: F811
    how = {"holdout": 0, "seq_len": 256, "tokenizer": str(model), "cache_dir": str(tmp_path / "cache")} | how
    model_folder = {} if form == "text" else {"model_folder": str(model)}
    return prepare(str(path), format=form, **model_folder, **how)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_held_out(model, tmp_path, form):  # noqa: F811
    prepared = prepared_from(write(tmp_path / "a.jsonl", FORMS[form](range(20))), form, model, tmp_path)
    assert prepared.eval_domains == ()
    (domain,) = prepared.domains
    assert prepared.summary["domains"][domain]["docs"] == 20
    assert prepared.summary["domains"][domain]["holdout_rows"] == 0
    assert prepared.summary["notes"] == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["file", "folder"])
def test_ones_own_validation_data_is_what_is_held_out_and_copies_are_counted(model, tmp_path, form, shape):  # noqa: F811
    path = tmp_path / "valid.jsonl" if shape == "file" else tmp_path / "valid" / "b" / "valid.jsonl"
    write(tmp_path / "train.jsonl", FORMS[form](range(40)))
    write(path, FORMS[form](range(35, 50)))
    validation = str(path if shape == "file" else tmp_path / "valid")
    prepared = prepared_from(tmp_path / "train.jsonl", form, model, tmp_path, validation=validation)
    times = 2 if form == "preferences" else 1
    assert len(texts(prepared, "train")) == 40 * times
    assert len(texts(prepared, "holdout")) == 15 * times
    assert "of 15 documents 5 are in the training data too" in prepared.summary["notes"][0]
    assert prepared.summary["validation"]["read"]["documents"] == {"found": 15, "used": 15, "refused": 0}
    assert prepared.summary["read"]["documents"]["used"] == 40
    (domain,) = prepared.eval_domains
    assert sum(len(batch["labels"]) for batch in prepared.eval_batches(domain, 4, 100)) > 0
    if form != "preferences":
        assert all_rows(prepared)["labels"].max() >= 0


def test_validation_data_of_several_domains(model, tmp_path):  # noqa: F811
    for name, seeds in (("a", range(30)), ("b", range(100, 130))):
        write(tmp_path / name / "x.jsonl", [{"messages": talk(i)} for i in seeds])
    for name, seeds in (("a", range(200, 205)), ("c", range(300, 307))):
        write(tmp_path / "valid" / name / "x.jsonl", [{"messages": talk(i)} for i in seeds])
    paths = {name: str(tmp_path / name) for name in "ab"}
    how = {"sources": paths, "holdout": 0, "validation": str(tmp_path / "valid"), "seq_len": 256}
    prepared = chat("installed", model, tmp_path, **how)
    assert prepared.domains == ("a", "b")
    assert prepared.eval_domains == ("a", "c")
    assert prepared.summary["domains"]["c"]["docs"] == prepared.summary["domains"]["c"]["holdout_docs"] == 7


def test_validation_data_without_a_usable_row_is_an_error(model, tmp_path):  # noqa: F811
    write(tmp_path / "train.jsonl", [{"messages": talk(i)} for i in range(20)])
    write(tmp_path / "valid.jsonl", [{"x": 1}])
    with pytest.raises(DataError, match="No usable"):
        chat(tmp_path / "train.jsonl", model, tmp_path, holdout=0, validation=str(tmp_path / "valid.jsonl"))
