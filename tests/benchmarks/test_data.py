"""What the benchmarks of data builds are made with: texts in other words, how units are compared."""

from benchmarks.data import data_texts
from benchmarks.data.data_kills import finished_units, written_again


def test_words_are_exchanged_one_for_one():
    ranked = [f"w{i}" for i in range(100)]
    other = data_texts._exchanged(ranked, 3)
    assert sorted(other) == sorted(other.values()) == sorted(ranked)
    assert all(abs(ranked.index(a) - ranked.index(b)) < data_texts._NEIGHBOURS for a, b in other.items())
    assert other != data_texts._exchanged(ranked, 4)


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
