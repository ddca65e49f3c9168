"""The held-out split: no near-copy of a held-out document is trained on, and every domain holds something out."""

import random
import re

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.data.conftest import WORDS, write_text
from tests.draws import examples
from tilewright.data.corpus.read import Spool
from tilewright.data.prepare import prepare
from tilewright.data.stages.copies.minhash import near_copy_clusters, shingle_hashes
from tilewright.data.stages.split.holdout import choose_holdout

SIGN = r"[+*/%<>=&|^~!#@$\\()\[\]{}]"
LETTER = r"[A-Za-z\x80-\U0010ffff]"
TOKEN = rf"""
    (?P<word>[A-Za-z0-9_]+ | [^\x00-\x7f][A-Za-z0-9_]*) | {SIGN} | -(?!{LETTER}) | (?<!{LETTER})-
    | (?<={SIGN})[:?'] | (?<=[:?'])[:?'] | [:?'](?={SIGN}) | [:?'](?=[:?'])
"""


def words_of(text):
    """The words as `near` sees them, each with the signs after it, by a regular expression: the reference."""
    found, ahead = [], ""
    for match in re.finditer(TOKEN, text, re.VERBOSE):
        if match["word"]:
            found.append([ahead, match[0].lower(), ""])
            ahead = ""
        elif found:
            found[-1][2] += match[0]
        else:
            ahead += match[0]
    return [tuple(word) for word in found]


def shingles_of(text):
    words = words_of(text)
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))} if words else set()


def jaccard(a, b):
    return len(a & b) / max(1, len(a | b))


def joined(texts):
    encoded = [t.encode() for t in texts]
    lengths = np.array([len(e) for e in encoded])
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum(lengths) - lengths, lengths


TEXT = st.text("ab cD_9-.é日\n<(+:'?", min_size=1, max_size=40)


@examples(200)
@given(st.lists(TEXT, min_size=1, max_size=6))
@example(["é日", "日é"])
@example(["-", "a-", "-a", ":", ":a", "+", ":+"])
def test_shingles_are_those_of_a_plain_reading(texts):
    """As many shingles, equal exactly where the words are equal, independent of the neighbours."""
    data, starts, _ = joined(texts)
    hashes, counts = shingle_hashes(data, starts)
    found = np.split(hashes, np.cumsum(counts)[:-1])
    meaning = {}
    for text, mine in zip(texts, found, strict=True):
        words = words_of(text)
        expected = [tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))] if words else []
        assert len(mine) == len(expected)
        for key, value in zip(expected, mine.tolist(), strict=True):
            assert meaning.setdefault(key, value) == value
    assert len(set(meaning.values())) == len(meaning), "two different shingles share a hash"


def near_copy(text, seed, share=0.02):
    """The text with a few words replaced."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) if rng.random() < share else w for w in text.split(" "))


def test_near_copies_cluster_and_others_do_not():
    originals = [write_text(i, 300) for i in range(40)]
    copies = [near_copy(text, i) for i, text in enumerate(originals)]
    clusters = near_copy_clusters(*joined(originals + copies))
    sets = [shingles_of(t) for t in originals + copies]
    for i in range(80):
        for j in range(i):
            similarity = jaccard(sets[i], sets[j])
            if similarity > 0.65:
                assert clusters[i] == clusters[j], f"{i} and {j} are {similarity:.2f} alike"
            if clusters[i] == clusters[j]:
                assert similarity > 0.3


def test_clusters_do_not_depend_on_chunks(monkeypatch):
    texts = [write_text(i, 120) for i in range(30)]
    arguments = joined(texts + [near_copy(t, 9) for t in texts])
    whole = near_copy_clusters(*arguments)
    monkeypatch.setattr("tilewright.data.stages.copies.minhash._CHUNK_BYTES", 1500)
    assert (near_copy_clusters(*arguments) == whole).all()


def plant_copies(root, num):
    """A folder where many documents have near-copies, within a domain and across two."""
    for domain in ("left", "right"):
        (root / domain).mkdir(parents=True)
    for i in range(num):
        text = write_text(i, 150)
        (root / "left" / f"{i}.txt").write_text(text)
        if i % 2:
            (root / "left" / f"{i}-copy.txt").write_text(near_copy(text, i))
        if i % 3 == 0:
            (root / "right" / f"{i}-other.txt").write_text(near_copy(text, 1000 + i))
        else:
            (root / "right" / f"{i}.txt").write_text(write_text(5000 + i, 150))


def worst_leak(prepared):
    """Highest similarity of a held-out document to a trained one, over all pairs of what was really written."""
    train = [shingles_of(t) for t in decoded(prepared, "train")]
    return max(jaccard(shingles_of(t), other) for t in decoded(prepared, "holdout") for other in train)


def test_no_leak_between_the_splits(tmp_path, monkeypatch):
    plant_copies(tmp_path / "data", 60)
    options = {"holdout": 0.15, "seq_len": 64, "vocab_size": 320}
    prepared = prepare(str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"), **options)
    assert worst_leak(prepared) < 0.65
    originals = {p.read_text().strip("\n") for p in (tmp_path / "data").rglob("*.txt")}
    assert {*decoded(prepared, "train"), *decoded(prepared, "holdout")} == originals
    for counts in prepared.summary["domains"].values():
        assert 0.05 < counts["holdout_tokens"] / counts["tokens"] < 0.3
    # Without the clusters the same split leaks, so the measure above means something.
    monkeypatch.setattr(
        "tilewright.data.corpus.build.near_copy_clusters", lambda _, offsets, *__: np.arange(len(offsets))
    )
    assert worst_leak(prepare(str(tmp_path / "data"), cache_dir=str(tmp_path / "other"), **options)) > 0.65


def decoded(prepared, split):
    """The documents of a split, read back from its token stream."""
    tokens = prepared._rows[split].tokens.tolist()
    tokenizer, texts, current = prepared.tokenizer, [], []
    for token in tokens:
        if token == tokenizer.eos_id:
            texts.append(tokenizer.decode(current))
            current = []
        elif token != tokenizer.bos_id:
            current.append(token)
    return texts


def spool_of(tmp_path, *domains):
    """A spool of documents, a list of texts a domain."""
    texts = [t for domain in domains for t in domain]
    path = tmp_path / "spool"
    path.write_bytes("".join(texts).encode())
    _, offsets, lengths = joined(texts)
    domain_of = np.repeat(np.arange(len(domains)), [len(d) for d in domains]).astype(np.int32)
    return Spool(
        path, tuple("abcdefgh"[: len(domains)]), [f"{i}.txt" for i in range(len(texts))], domain_of, offsets, lengths
    )


def test_one_book_gives_its_tail(tmp_path):
    spool = spool_of(tmp_path, [write_text(1, 3000)])
    split = choose_holdout(spool, np.zeros(1, np.int64), 0.05, 0)
    (document, at), length = next(iter(split.cut.items())), int(spool.lengths[0])
    assert document == 0
    assert 0.9 < at / length < 0.96
    assert spool.path.read_bytes()[at - 1 : at] == b"\n"


def test_cut_never_splits_a_character(tmp_path):
    spool = spool_of(tmp_path, ["日本" * 400])
    split = choose_holdout(spool, np.zeros(1, np.int64), 0.1, 0)
    at = split.cut[0]
    data = spool.path.read_bytes()
    assert data[:at].decode() + data[at:].decode() == "日本" * 400


def test_a_domain_too_small_is_dropped_and_said(tmp_path):
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    (tmp_path / "data" / "tiny" / "x.txt").write_text("just this")
    for i in range(20):
        (tmp_path / "data" / f"{i}.txt").write_text(write_text(i, 50))
    prepared = prepare(str(tmp_path / "data"), seq_len=32, vocab_size=300, cache_dir=str(tmp_path / "cache"))
    assert prepared.domains == ("text",)
    refused = prepared.summary["refused"]["domain too small to hold a part out"]
    assert (refused["files"], refused["documents"], refused["text_bytes"]) == (1, 1, 9)


@examples(100)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 6)), min_size=1, max_size=9), min_size=1, max_size=4
    )
)
def test_every_domain_gets_both_parts_or_is_dropped(tmp_path_factory, layout):
    """Any sizes and clusters, also across domains."""
    texts = [["x" * size for size, _ in domain] for domain in layout]
    clusters = np.array([cluster for domain in layout for _, cluster in domain])
    spool = spool_of(tmp_path_factory.mktemp("spool"), *texts)
    split = choose_holdout(spool, clusters, 0.1, 3)
    for domain in range(len(layout)):
        here = np.flatnonzero(spool.domain_of == domain)
        cut = [i for i in here if i in split.cut]
        held, kept = split.held[here].sum() + len(cut), (~split.held[here]).sum()
        assert domain in split.dropped or (held and kept)
    for cluster in set(clusters.tolist()):
        sides = set(split.held[clusters == cluster].tolist())
        assert len(sides) == 1, "a cluster is on both sides"


def test_holdout_is_near_the_share(prepared):
    for name, counts in prepared.summary["domains"].items():
        assert 0.03 < counts["holdout_tokens"] / counts["tokens"] < 0.25, name
