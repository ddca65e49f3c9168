"""Copies: against a plain search over all pairs, planted near-copies, chains, and which one stays."""

import functools
import itertools
import json
import random
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.build.corpora import build, changed, prose, settings, words
from tilewright.data.stages.copies import near_copies

NO_NEAR = {"near": False, "exact": False}


@functools.cache
def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """All runs of five words, written down plainly."""
    words = re.findall(r"[a-z0-9_]+", text.lower())
    return frozenset(tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4)))


def jaccard(a: str, b: str) -> float:
    one, two = shingles(a), shingles(b)
    both = len(one & two)
    return both / (len(one) + len(two) - both)


def write(folder, texts):
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:04}.txt").write_text(text)
    return folder


def outcome(out):
    kept = {row["path"] for row in pq.read_table(out / "records").to_pylist()}
    gone = {row["path"]: row for row in pq.read_table(out / "rejects").to_pylist()}
    return kept, gone


@pytest.fixture(scope="module")
def planted():
    """150 texts, a near-copy of each third with 1 % of the words changed, and of ten more with half of them."""
    texts = [prose(i, 300) for i in range(150)]
    copies = [changed(text, 0.01, i) for i, text in enumerate(texts[::3])]
    return texts + copies + [changed(text, 0.3, i) for i, text in enumerate(texts[1:30:3])]


def test_similarities_are_those_of_a_plain_search(tmp_path, planted):
    source = write(tmp_path / "in", planted)
    build(settings(source), tmp_path / "out")
    ids = {row["id"]: row["path"] for row in pq.read_table(tmp_path / "out" / "records").to_pylist()}
    _, gone = outcome(tmp_path / "out")
    assert len(gone) == 50
    for path, row in gone.items():
        similarity, _, stays = row["value"].partition(" with ")
        plain = jaccard((source / path).read_text(), (source / ids[stays]).read_text())
        assert float(similarity) == pytest.approx(plain, abs=1e-3), path


def test_planted_copies_are_found_and_nothing_else_is_lost(tmp_path, planted):
    """With every pair compared plainly: what resembles another one by the threshold goes, one of each pair."""
    source = write(tmp_path / "in", planted)
    build(settings(source), tmp_path / "out")
    kept, gone = outcome(tmp_path / "out")
    names = [f"{i:04}.txt" for i in range(len(planted))]
    close = [
        (a, b) for a, b in itertools.combinations(range(len(planted)), 2) if jaccard(planted[a], planted[b]) >= 0.8
    ]
    assert len(close) == 50
    assert not [pair for pair in close if names[pair[0]] in kept and names[pair[1]] in kept]
    assert {names[b] for _, b in close} | {names[a] for a, _ in close} >= set(gone)
    assert len(gone) == len(close)


def test_copies_with_a_twentieth_of_the_words_changed(tmp_path):
    """Their similarity is 0.63: at a threshold of 0.5 at least 98 % are found, and no distinct text is lost."""
    texts = [prose(3000 + i, 300) for i in range(300)]
    copies = [changed(text, 0.05, i) for i, text in enumerate(texts[:150])]
    source = write(tmp_path / "in", texts + copies)
    build(settings(source, duplicates={"threshold": 0.5}), tmp_path / "out")
    kept, gone = outcome(tmp_path / "out")
    pairs = [{f"{i:04}.txt", f"{300 + i:04}.txt"} for i in range(150)]
    assert sum(len(pair & kept) == 1 for pair in pairs) >= 0.98 * len(pairs)
    assert all(pair & kept for pair in pairs)
    assert {f"{i:04}.txt" for i in range(150, 300)} <= kept
    assert set(gone) <= {name for pair in pairs for name in pair}


def test_no_chain_of_neighbours_deletes_what_resembles_nobody(tmp_path):
    """a ~ b ~ c ~ ..., each a little changed: the ends do not resemble each other, and each goes by one that stays."""
    rng, text = random.Random(3), prose(0, 300)
    chain = [text]
    for i in range(12):
        chain.append(changed(chain[-1], 0.012, rng.randrange(10**6) + i))
    source = write(tmp_path / "in", chain + [prose(100 + i, 300) for i in range(20)])
    build(settings(source), tmp_path / "out")
    kept, gone = outcome(tmp_path / "out")
    ids = {row["id"]: row["path"] for row in pq.read_table(tmp_path / "out" / "records").to_pylist()}
    assert 1 < len(kept & {f"{i:04}.txt" for i in range(13)}) < 13
    for path, row in gone.items():
        stays = ids[row["value"].partition(" with ")[2]]
        assert stays in kept
        assert jaccard((source / path).read_text(), (source / stays).read_text()) >= 0.8


@pytest.mark.parametrize(("keep", "stays"), [("longest", "0001.txt"), ("first", "0000.txt")])
def test_which_copy_stays(tmp_path, keep, stays):
    text = prose(0, 400)
    source = write(
        tmp_path / "in", [text, text + "and one more sentence at its end.", *(prose(i) for i in range(9, 30))]
    )
    build(settings(source, duplicates={"keep": keep}), tmp_path / "out")
    kept, gone = outcome(tmp_path / "out")
    assert stays in kept
    assert set(gone) == {"0000.txt", "0001.txt"} - {stays}


def test_copies_stay_where_that_is_asked_and_are_never_divided(tmp_path, planted):
    """Without dropping, near-copies still are in one part of the dataset: no copy of held-out text is trained on."""
    source = write(tmp_path / "in", planted)
    build(settings(source, duplicates=NO_NEAR, split={"holdout": 0.3}), tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / "tokens" / "documents.parquet").to_pylist()
    assert len(table) == len(planted)
    part = {int(row["path"][:4]): row["split"] for row in table}
    assert set(part.values()) == {"train", "holdout"}
    for a, b in itertools.combinations(range(len(planted)), 2):
        if jaccard(planted[a], planted[b]) >= 0.65:
            assert part[a] == part[b], (a, b)


_SIGNS = """
    + - * / // % ** < > <= >= == != = := & | ^ && || -> => << >> <> += -= *= /= ~ @ \\ ++ -- :: ?: ??
"""
OPERATORS = _SIGNS.split()
DISTINCT = (
    ("C", "C++", "C#", "C--"),
    ("a[1:]", "a[:1]", "a[1]", "a(1)", "a{1}", "a 1"),
    ("(b + c) * d", "b + c * d", "b + (c * d)"),
    ("f(x) = 2", "f'(x) = 2", "f''(x) = 2"),
    ("y = -1", "y = 1", "y = +1", "y = ~1", "y = !1"),
    ("n! = 6", "n = 6"),
    ("{1, 2}", "[1, 2]", "(1, 2)", "[1, 2)", "(1, 2]"),
    ("$x$", "x", "@x", "#x", "&x", "*x", "\\x", "%x", "^x", "~x"),
    ("z^2", "z_2", "z2", "z*2"),
    ("50%", "50", "$50", "#50"),
    ("P(A|B)", "P(A, B)", "P(A & B)"),
    ("p->q", "p=>q", "p<->q", "p.q", "p::q"),
    ("k-3", "k+3", "k 3"),
    ("u ?: v", "u ? v", "u ?? v"),
)
"""Of each group no two say the same."""


def rows_kept(tmp_path, rows) -> set[str]:
    source = tmp_path / "in"
    source.mkdir()
    (source / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    build(settings(source), tmp_path / "out")
    return {row["text"] for row in pq.read_table(tmp_path / "out" / "records").to_pylist()}


def test_rows_of_code_that_differ_in_an_operator_stay(tmp_path):
    """Every operator in the same place of several statements, and signs that stand at a word."""
    statements = ("if total {} limit then stop", "while left {} right do step", "l {} m", "return first {} second")
    rows = [statement.format(operator) for statement in statements for operator in OPERATORS]
    rows += [row for group in DISTINCT for row in group]
    assert rows_kept(tmp_path, rows) == set(rows)


def test_code_that_differs_in_white_space_is_a_copy(tmp_path):
    """And prose that differs in commas, hyphens, quotes and case."""
    pairs = {
        "for(i=0;i<n;++i){a[i]=b[i]*c;}": "for (i = 0; i < n; ++i) {\n    a[i] = b[i] * c;\n}",
        "def f(x, *rest): return x if x>0 else -x": "def f(x,*rest):\n    return x if x > 0 else -x\n",
        "It was a well-known, rather long story; he said so.": 'it was a well known rather long story: "He said so"',
    }
    kept = rows_kept(tmp_path, [*pairs, *pairs.values()])
    assert len(kept) == len(pairs), kept


def test_ranges_of_hashes_change_nothing(tmp_path, planted, monkeypatch):
    """A corpus so large that its hashes are shared out over many ranges gives the same dataset."""
    from tilewright.data.engine import hash_ranges

    source = write(tmp_path / "in", planted)
    build(settings(source), tmp_path / "one")
    monkeypatch.setattr(hash_ranges, "RANGE_BYTES", 4096)
    build(settings(source), tmp_path / "many")
    assert len(list((tmp_path / "many" / "work" / "pairs").iterdir())) > 10
    assert outcome(tmp_path / "many") == outcome(tmp_path / "one")


def test_jaccard_of_sorted_sets():
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (np.unique(rng.integers(0, 50, rng.integers(0, 30)).astype(np.uint64)) for _ in range(2))
        one, two = set(a.tolist()), set(b.tolist())
        assert near_copies.jaccard(a, b) == pytest.approx(len(one & two) / max(1, len(one | two)))


@pytest.mark.parametrize(("num_tasks", "num_rows"), [(1, 40), (3, 40), (2, 200)])
def test_a_task_with_one_long_instruction_is_not_held_out_as_a_whole(tmp_path, num_tasks, num_rows):
    """Rows that share most words by their instruction are near-copies at the split's 0.5; as in `prepare`."""
    rng = random.Random(5)
    rows_ = []
    for task in range(num_tasks):
        fixed = f"task{task}x " + " ".join(words(rng, 60))
        rows_ += [f"{fixed} {' '.join(words(rng, 25))} {number}" for number in range(num_rows)]
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows_))
    how = {"split": {"holdout": 0.1}, "duplicates": {"near": False}}  # the last case has several shards
    content = build(settings(source, **how), tmp_path / "out")
    records = tmp_path / "out" / "records"
    tables = {
        split: [text for file in records.glob(f"{split}-*.parquet") for text in pq.read_table(file)["text"].to_pylist()]
        for split in ("train", "holdout")
    }
    for task in range(num_tasks):
        assert any(f"task{task}x" in text for text in tables["train"])
    assert 0 < len(tables["holdout"]) <= 0.2 * len(rows_)
    assert any("divided inside" in note for note in content["summary"]["notes"])
