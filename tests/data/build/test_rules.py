"""Rules: each measure on texts whose value is known, thresholds, histograms, languages, repairs and repeated lines."""

import json
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.build.corpora import build, prose, settings, write_corpus
from tilewright.core.errors import ConfigError
from tilewright.data.engine.build_settings import RepairSection, RulesSection
from tilewright.data.stages.text import apply_rules
from tilewright.data.stages.text.apply_rules import thresholds
from tilewright.data.stages.text.repair_text import line_hash, repaired, without_lines
from tilewright.data.stages.text.text_measures import MEASURES, Measured

KNOWN = [
    ("chars", "abc de", 6),
    ("words", "one two  three\nfour", 4),
    ("mean_word_chars", "ab abcd", 3),
    ("symbol_share", "# a b ... c …", 3 / 6),
    ("bullet_lines", "- a\n* b\nc\n\nd", 0.5),
    ("ellipsis_lines", "a...\nb…\nc\nd", 0.5),
    ("alphabetic_words", "a1 22 33 b", 0.5),
    ("stop_words", "The cat and the dog, of course", 3),
    ("duplicate_lines", "a\nb\na\na", 0.5),
    ("duplicate_line_chars", "aaa\nb\naaa", 3 / 7),
    ("duplicate_paragraphs", "x\n\ny\n\nx\n\nz", 0.25),
    ("duplicate_paragraph_chars", "xx\n\ny\n\nxx", 2 / 5),
    ("top_2gram_chars", "aa b aa b c", 6 / 7),
    ("top_3gram_chars", "a b c d e", 0),
    ("top_4gram_chars", "a b c d a b c d", 1),
    ("duplicate_5gram_chars", "a b c d e f a b c d e g", 5 / 12),
    ("duplicate_10gram_chars", " ".join("abcdefghij") + " " + " ".join("abcdefghij"), 0.5),
    ("punctuated_lines", "a.\nb\nc?\nd", 0.5),
    ("short_lines", "short\n" + "x" * 31, 0.5),
    ("sentences", "One. Two! Is it 3.5? Yes", 3),
    ("curly_brackets", "{a} }", 3),
]


@pytest.mark.parametrize(("name", "text", "value"), KNOWN, ids=[name for name, _, _ in KNOWN])
def test_measures(name, text, value):
    assert MEASURES[name](Measured(text)) == pytest.approx(value)


def top_gram_chars(words: list[str], n: int) -> float:
    """As the paper has it, word by word."""
    grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    gram, count = grams.most_common(1)[0] if grams else ((), 0)
    return min(1.0, count * sum(map(len, gram)) / sum(map(len, words))) if count > 1 else 0.0


def duplicate_gram_chars(words: list[str], n: int) -> float:
    seen, chars, at = set(), 0, 0
    while at + n <= len(words):
        gram = tuple(words[at : at + n])
        chars += sum(map(len, gram)) if gram in seen else 0
        at += n if gram in seen else 1
        seen.add(gram)
    return chars / max(1, sum(map(len, words)))


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "1", "dddd", "\u00e9"]), max_size=80), st.integers(1, 3))
def test_runs_of_words_are_counted_as_word_by_word(words, times):
    words = words * times
    text = Measured(" ".join(words))
    for n in (2, 3, 4):
        assert MEASURES[f"top_{n}gram_chars"](text) == top_gram_chars(words, n), n
    for n in (5, 10):
        assert MEASURES[f"duplicate_{n}gram_chars"](text) == duplicate_gram_chars(words, n), n
    assert MEASURES["alphabetic_words"](text) == sum(word != "1" for word in words) / max(1, len(words))


def test_every_measure_is_known_here_and_bounded():
    assert {name for name, _, _ in KNOWN} == set(MEASURES)
    for measure in MEASURES.values():
        for text in ("", " ", "\n", "a", "\u3002" * 9, "." * 1000):
            assert measure(Measured(text)) >= 0


def test_every_threshold_is_a_rule():
    values = {name: 1 for name in RulesSection.model_fields if name.startswith(("min_", "max_"))}
    found = {rule.name for rule in thresholds(RulesSection(**values))}
    assert found == set(values) - {"min_language_score"}


def test_rules_drop_with_value_and_threshold_and_are_counted(tmp_path):
    source = write_corpus(tmp_path / "in")
    on = {"min_words": 20, "max_duplicate_lines": 0.5, "domains": ("prose",)}
    (source / "rows" / "tiny.txt").write_text("tiny")
    (source / "prose" / "again.txt").write_text("the same line of words over and over\n" * 30)
    build(settings(source, rules=on), tmp_path / "out")
    found = {r["path"]: r for r in pq.read_table(tmp_path / "out" / "rejects").to_pylist() if r["stage"] == "rules"}
    assert {path: (row["rule"], row["value"], row["threshold"]) for path, row in found.items()} == {
        "prose/short.txt": ("min_words", "2", "20"),
        "prose/again.txt": ("max_duplicate_lines", "0.966667", "0.5"),
    }
    histograms = {}
    for file in (tmp_path / "out" / "work" / "rules").glob("*/histograms.json"):
        for key, counts in json.loads(file.read_bytes()).items():
            histograms[key] = histograms.get(key, 0) + np.array(counts)
    assert set(histograms) == {"prose\0words", "prose\0duplicate_lines"}
    assert histograms["prose\0words"].sum() == 34
    assert histograms["prose\0words"][2] == 1  # two words: the bin of [2, 4)


def test_languages(tmp_path):
    pytest.importorskip("py3langid")
    source = tmp_path / "in"
    source.mkdir()
    english = "The quick brown fox jumps over the lazy dog, and this is a plain English sentence number {}. "
    german = "Der schnelle braune Fuchs springt über den faulen Hund, und das ist ein deutscher Satz Nummer {}. "
    for i in range(8):
        (source / f"en{i}.txt").write_text("".join(english.format(i * 9 + j) for j in range(9)) + prose(i, 5))
        (source / f"de{i}.txt").write_text("".join(german.format(i * 9 + j) for j in range(9)) + prose(i, 5))
    build(settings(source, rules={"languages": ("en",)}, duplicates={"near": False}), tmp_path / "out")
    kept = pq.read_table(tmp_path / "out" / "records").to_pylist()
    assert {row["path"][:2] for row in kept} == {"en"}
    assert {row["language"] for row in kept} == {"en"}


@pytest.mark.parametrize(("score", "rule"), [(0.5, "min_language_score"), (0.9, None)])
def test_a_language_that_is_not_sure(tmp_path, monkeypatch, score, rule):
    """The threshold of the score, with an identifier that says what the test wants."""
    monkeypatch.setattr(
        apply_rules, "find_languages", lambda: lambda text: ("en", score if text.startswith("b") else 1.0)
    )
    source = write_corpus(tmp_path / "in")
    build(settings(source, rules={"languages": ("en",), "min_language_score": 0.8}), tmp_path / "out")
    found = {row["rule"] for row in pq.read_table(tmp_path / "out" / "rejects").to_pylist() if row["stage"] == "rules"}
    assert found == ({rule} if rule else set())


def test_languages_without_the_library_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "py3langid.langid", None)
    source = write_corpus(tmp_path / "in")
    with pytest.raises(ConfigError, match="py3langid"):
        build(settings(source, rules={"languages": ("en",)}), tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "repair", "wanted"),
    [
        ("\r\n a\r\nb \r\n\n", {}, " a\nb "),
        ("a\0b", {}, "ab"),
        ("e\u0301", {}, "é"),
        ("e\u0301", {"unicode": "none"}, "e\u0301"),
        ("mail a.b+c@ex-ample.co.uk now", {"mask": ("email",)}, "mail <email> now"),
        ("at 192.168.0.1:80, v1.2.3.4.5", {"mask": ("ip",)}, "at <ip>:80, v1.2.3.4.5"),
        ("call +49 (30) 1234-5678 or 12345678", {"mask": ("phone",)}, "call <phone> or 12345678"),
        ("a@b.de 1.1.1.1", {}, "a@b.de 1.1.1.1"),
    ],
)
def test_repairs(text, repair, wanted):
    assert repaired(text, RepairSection(**repair))[0] == wanted


def test_lines_of_a_hash_are_removed():
    common = np.sort(np.array([line_hash("d", "menu | home | about us")], np.uint64))
    text = "menu | home | about us\nwords\n  menu | home | about us\nend"
    assert without_lines(text, "d", common, 20) == ("words\nend", 2)
    assert without_lines(text, "e", common, 20) == (text, 0)


def test_repeated_lines_go_where_that_is_asked(tmp_path):
    source = tmp_path / "in"
    for domain, num in (("web", 20), ("other", 4)):
        (source / domain).mkdir(parents=True)
        for i in range(num):
            text = f"Home | About | Contact | {domain}\n{prose(i + 100 * num)}All rights reserved by nobody\n"
            (source / domain / f"{i}.txt").write_text(text)
    build(settings(source, repair={"repeated_lines": 10}), tmp_path / "out")
    texts: dict[str, str] = {}
    for row in pq.read_table(tmp_path / "out" / "records").to_pylist():
        texts[row["path"]] = texts.get(row["path"], "") + row["text"]  # a small domain holds out the end of a text
    for path, text in texts.items():
        assert ("rights reserved" in text, "Home |" in text) == (path.startswith("other"),) * 2, path
