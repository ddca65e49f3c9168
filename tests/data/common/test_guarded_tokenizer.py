"""Tokenizers that take all the time or memory there is, or panic, end one text; those that are trusted are fast."""

import json
import pickle
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.cover import some
from tests.data.chat.families import FAMILIES, make_folder
from tests.draws import examples
from tilewright.core.errors import DataError
from tilewright.data.common import guarded_tokenizer
from tilewright.data.common.guarded_tokenizer import PROVEN, Direct, Limited, TokenizerError, failures_told, reader_of
from tilewright.data.common.tokenizer import load_tokenizer, train_tokenizer

WAIT_S = 200
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A limit that a test can wait for."""
    monkeypatch.setattr(guarded_tokenizer, "_CPU_S", 1.0)


def tokenizer_with(folder, *, pattern=None, normalizer=None, decoder=None):
    """A tokenizer of single letters with these parts, loaded from a folder."""
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*LETTERS, "</s>"])}, []))
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), *([decoder] if decoder else [])])
    if normalizer is not None:
        backend.normalizer = normalizer
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


HOSTILE = ["a" * 40 + "!", "a" * 20_000 + "!", "ab" * 5_000 + "!", "x" + " " * 20_000 + "y"]


@pytest.mark.parametrize(
    "pattern", [r"^(a+)+$", r"(a|aa)+$", r"(a|a)*b", r"(\w*)*=", r"((ab)*)*c", r"(.*)(.*)(.*)(.*)[=]"]
)
def test_a_pattern_that_backtracks_ends_one_text_and_others_go_on(pattern, tmp_path):
    tokenizer = tokenizer_with(tmp_path, pattern=pattern)
    assert isinstance(tokenizer.reader, Limited)
    start = time.perf_counter()
    for text in HOSTILE[:3]:
        try:
            ids = tokenizer.encode(text)
        except TokenizerError as error:
            problem = error.problems[0]
            assert all((problem.got, problem.need, problem.try_)), problem
        else:
            assert tokenizer.decode(ids) == text
    assert time.perf_counter() - start < WAIT_S
    assert tokenizer.decode(tokenizer.encode("hello é")) == "hello é"


def grows(times):
    return normalizers.Sequence([normalizers.Replace("a", "a" * 100)] * times)


LONG = {
    "normalizer": ({"normalizer": grows(6)}, "aaaa"),
    "prepended": (
        {"normalizer": normalizers.Sequence([normalizers.Prepend("a" * 1000)] * 3 + [grows(5)])},
        "b",
    ),
    "decoder": ({"decoder": decoders.Sequence([decoders.Replace("a", "a" * 100)] * 6)}, "aaaa"),
    "decoder's pattern": ({"decoder": decoders.Replace(Regex("(a+)+$"), "a")}, "a" * 60 + "!"),
}


@pytest.mark.parametrize("name", some(LONG, "normalizer", "decoder's pattern"))
def test_a_part_that_writes_gigabytes_ends_one_text(name, tmp_path):
    parts, text = LONG[name]
    tokenizer = tokenizer_with(tmp_path, **parts)
    assert isinstance(tokenizer.reader, Limited)
    start = time.perf_counter()
    if "decoder" in parts:
        ids = tokenizer.encode(text)
        with suppress(TokenizerError):
            tokenizer.decode(ids)
    else:
        with pytest.raises(TokenizerError, match="takes too much"):
            tokenizer.encode(text)
    assert time.perf_counter() - start < WAIT_S


def test_a_panic_is_an_error_of_one_text():
    """`PanicException` is no `Exception`: what catches those would let it end a thread."""

    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    with pytest.raises(TokenizerError, match="index out of bounds") as caught, failures_told("Tokenizer fails"):
        raise panic("index out of bounds\nmore")
    assert isinstance(caught.value, DataError)
    for other in (KeyboardInterrupt, ValueError("x"), SystemExit):
        with pytest.raises(other if isinstance(other, type) else type(other)), failures_told("Tokenizer fails"):
            raise other


def test_a_word_that_the_vocabulary_lacks_is_an_error_of_one_text(tmp_path):
    backend = Tokenizer(models.WordLevel({"</s>": 0, "hello": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="fails on a text"):
        tokenizer.encode("you")
    assert tokenizer.encode("hello") == [1]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"Regex": 1}', '{"model": {"Regex": "(a+)+$"}}'])
def test_a_file_that_is_no_tokenizer_is_refused_in_words(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_pattern_that_is_large_when_compiled_ends(tmp_path):
    tokenizer_with(tmp_path, pattern="b+x")
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    nested = "a"
    for _ in range(7):
        nested = f"(?:{nested}|b{nested}){{50,90}}"
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = nested
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    start = time.perf_counter()
    with suppress(DataError):
        load_tokenizer(tmp_path).encode("ab" * 9)
    assert time.perf_counter() - start < WAIT_S


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), max_size=4), st.booleans())
@examples(60)
def test_inside_and_outside_of_the_process_ids_and_texts_are_the_same(readers, texts, special):
    for direct, limited in readers:
        assert direct.encode_ids(texts) == limited.encode_ids(texts)
        assert direct.encode_batch(texts) == limited.encode_batch(texts)
        for text in texts:
            found = direct.encode(text, special)
            assert found == limited.encode(text, special)
            for skip in (False, True):
                assert direct.decode(found.ids, skip) == limited.decode(found.ids, skip)


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    found = []
    for name in ("qwen3", "mistral"):
        backend = load_tokenizer(make_folder(tmp_path_factory.mktemp(name), name)).backend
        found.append((Direct(backend), pickle.loads(pickle.dumps(Limited(backend)))))
    return found


def test_trained_and_published_layouts_read_in_this_process(tmp_path):
    assert isinstance(train_tokenizer(["hello " * 9], 300).reader, Direct)
    for name in FAMILIES:
        assert isinstance(load_tokenizer(make_folder(tmp_path / name, name)).reader, Direct), name


RUNS = [
    unit * (8_000 // len(unit))
    for unit in ("a", "A", " ", "\n", " \n", "1", "!", "'s", "aA", "é", "一", "\u0301", "a ")
]


@pytest.mark.parametrize("pattern", sorted(PROVEN))
def test_a_proven_pattern_takes_time_in_proportion_to_the_text(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for unit in RUNS:
        for text in (unit, unit + "x", unit + "\u00a0", unit + "!"):
            times = []
            for part in (text[len(text) // 2 :], text):
                start = time.process_time()
                split.pre_tokenize_str(part)
                times.append(time.process_time() - start)
            # Twice the text takes twice as long, and four times where backtracking is quadratic.
            assert times[1] < 3 * times[0] + 0.1, (unit[:3], times)


def test_growth_and_patterns_are_found_wherever_they_are(tmp_path):
    def reads(normalizer):
        backend = Tokenizer(models.BPE())
        backend.normalizer = normalizer
        return type(reader_of(backend)).__name__

    assert reads(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])) == "Direct"
    assert reads(normalizers.Replace(Regex(" {2,}"), "▁")) == "Direct"
    assert reads(normalizers.Replace(Regex(" {3,}"), "▁")) == "Limited"
    assert reads(normalizers.Sequence([normalizers.Sequence([normalizers.Replace("a", "b" * 17)])])) == "Limited"
    assert reads(normalizers.Sequence([normalizers.Replace("a", "aa")] * 5)) == "Limited"
