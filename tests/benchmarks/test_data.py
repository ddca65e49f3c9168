"""What the benchmarks of data builds are made with: texts in other words, planted copies, how units are compared."""

import random
import re

import pytest

from benchmarks.data import data_copies, data_texts
from benchmarks.data.data_kills import finished_units, written_again

TEXT = "one two three four five six seven eight nine ten\n" * 3 + "eleven (twelve) thirteen; fourteen fifteen."


def test_words_are_exchanged_one_for_one():
    ranked = [f"w{i}" for i in range(100)]
    other = data_texts._exchanged(ranked, 3)
    assert sorted(other) == sorted(other.values()) == sorted(ranked)
    assert all(abs(ranked.index(a) - ranked.index(b)) < data_texts._NEIGHBOURS for a, b in other.items())
    assert other != data_texts._exchanged(ranked, 4)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_a_copy_has_that_share_of_other_words(share):
    new = data_copies.with_other_words(TEXT, share, random.Random(1), ["alpha", "beta", "One"])
    old, found = data_copies._WORD.findall(TEXT), data_copies._WORD.findall(new)
    assert sum(a.lower() != b.lower() for a, b in zip(old, found, strict=True)) == max(1, round(share * len(old)))
    assert re.sub(data_copies._WORD, "", TEXT) == re.sub(data_copies._WORD, "", new)


def test_similarities_are_those_of_sets():
    texts = ["a b c d e f g", "A b c d e f. g h", "x y z", "a b c d e"]
    found = data_copies.similarities(texts)
    values = {(a, b): s for a, b, s in zip(found.row.tolist(), found.col.tolist(), found.data.tolist(), strict=True)}
    assert values == {(0, 1): 3 / 4, (0, 3): 1 / 3, (1, 3): 1 / 4}


def test_a_unit_that_is_written_again_or_gone_is_told(tmp_path):
    for name in ("read/00000", "read/00001", "rules/00000", "rules/00001.part-7"):
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "receipt.json").write_text("{}")
    before = finished_units(tmp_path)
    assert len(before) == 3
    assert written_again(before, finished_units(tmp_path)) == []
    changed = {path: at + (path.parts[-3:-1] == ("read", "00001")) for path, at in before.items()}
    changed.pop(tmp_path / "work" / "rules" / "00000" / "receipt.json")
    assert written_again(before, changed) == ["read 00001", "rules 00000"]
