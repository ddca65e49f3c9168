"""Ids by tiktoken are those of `tokenizers`, for trained vocabularies and for lists of pairs that no training makes."""

import json
import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.cover import covering
from tests.data.conftest import write_text
from tests.draws import examples
from tilewright.data.common.ranked_bpe import _PATTERNS, RankedBpe, classes_agree, ranks_of
from tilewright.data.common.tokenizer import SPLIT_PATTERN, train_tokenizer

pytest.importorskip("tiktoken")

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
ODD = (
    "aaab 'S 'ſ ſK I'LL don't ١٢٣ ²½ \u200b\u0301e\u0301é Åﬁ漢字カタ ไทย 🦊👩‍👩‍👧 \x00\x1c\x85\xa0\u2028\t\t  \r\n\n \n"
)
"""Cases of letters, digits of other scripts, marks, ligatures, white space of all kinds."""


def backend_of(vocab, merges, pattern=SPLIT_PATTERN, **model):
    found = Tokenizer(models.BPE(vocab, merges, **model))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    found.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    found.decoder = decoders.ByteLevel()
    found.encode_special_tokens = True
    return found


def assert_same(backend, texts):
    """tiktoken has ranks for the tokenizer, and gives its ids; texts that it leaves out are left out."""
    ranks = ranks_of(backend)
    assert not isinstance(ranks, str), ranks
    found = RankedBpe(ranks).encode(texts)
    for text, mine in zip(texts, found, strict=True):
        if mine is not None:
            assert mine == backend.encode(text, add_special_tokens=False).ids, repr(text)
    return [text for text, mine in zip(texts, found, strict=True) if mine is None]


@st.composite
def odd_vocabularies(draw):
    """Vocabulary, pairs in any order, of strings over few letters: pairs that nothing makes, several of one string,
    parts that are merged after what they are a part of, tokens that no pair makes."""
    rng = random.Random(draw(st.integers(0, 10**9)))
    letters = draw(st.sampled_from(["ab", "abc", "aé"]))
    units = list("".join(c for text in letters for c in _as_bytes(text)))
    strings = list(dict.fromkeys(units))
    merges = []
    for _ in range(draw(st.integers(1, 40))):
        pair = rng.choice(strings), rng.choice(strings)
        if len("".join(pair)) <= 9 and pair not in merges:
            merges.append(pair)
            if "".join(pair) not in strings:
                strings.append("".join(pair))
    if draw(st.booleans()):
        rng.shuffle(merges)
    if draw(st.booleans()):
        merges = merges[len(merges) // 4 :]  # of what these made, nothing is made any more
    tokens = [*BYTES, *(s for s in strings if s not in BYTES)]
    if draw(st.booleans()):
        rng.shuffle(tokens)
    made = {"".join(pair) for pair in merges}
    orphans = [s for s in tokens if s not in BYTES and s not in made]
    vocab = {token: number for number, token in enumerate(tokens)}
    texts = ["".join(rng.choice(letters) for _ in range(rng.randint(1, 60))) for _ in range(30)]
    return vocab, merges, orphans, [*texts, *(t for t in (_as_text(s) for s in strings) if t)]


def _as_bytes(text):
    return "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))


def _as_text(string):
    """The text of a string of a vocabulary, "" where it is no whole characters."""
    found = decoders.ByteLevel().decode([string])
    return "" if "\ufffd" in found else found


@examples(150)
@given(odd_vocabularies())
def test_any_list_of_pairs(case):
    vocab, merges, _, texts = case
    assert not assert_same(backend_of(vocab, merges), texts)


@examples(150)
@given(odd_vocabularies())
def test_any_list_of_pairs_whose_tokens_are_pieces_at_once(case):
    """`ignore_merges`: equal, or refused because tiktoken would merge what no pair does."""
    vocab, merges, _, texts = case
    backend = backend_of(vocab, merges, ignore_merges=True)
    ranks = ranks_of(backend)
    if isinstance(ranks, str):
        assert "two that are not merged" in ranks
        plain = models.BPE(vocab, merges)
        assert any(len(plain.tokenize(text)) == 2 for text in vocab)
    else:
        assert not assert_same(backend, texts)


@pytest.mark.parametrize(
    ("pattern", "kind"),
    covering(
        sorted(_PATTERNS), ("as trained", "ids permuted", "pairs shuffled", "pairs removed", "all pairs"), pairs=False
    ),
)
def test_trained_vocabularies_on_odd_texts(pattern, kind):
    texts = [write_text(i, 120) for i in range(12)] + [ODD]
    rng = random.Random(3)
    trained = json.loads(train_tokenizer(texts, 700).backend.to_str())["model"]
    vocab, merges = trained["vocab"], [tuple(pair) for pair in trained["merges"]]
    if kind == "ids permuted":
        ids = list(vocab.values())
        rng.shuffle(ids)
        vocab = dict(zip(vocab, ids, strict=True))
    elif kind == "pairs shuffled":
        rng.shuffle(merges)
    elif kind == "pairs removed":
        merges = [pair for pair in merges if rng.random() > 0.2]
    elif kind == "all pairs":  # as Llama 3 lists them: each token from every pair that makes it
        places = {"".join(pair): place for place, pair in enumerate(merges)}
        every = [(s[:i], s[i:]) for s in places for i in range(1, len(s)) if s[:i] in vocab and s[i:] in vocab]
        merges = sorted(every, key=lambda pair: places["".join(pair)])
    mixed = ["".join(rng.choice(ODD + texts[i % 12][:200]) for _ in range(300)) for i in range(60)]
    for ignore in (False, True) if kind in ("as trained", "all pairs") else (False,):
        assert not assert_same(backend_of(vocab, merges, pattern, ignore_merges=ignore), ["", *texts, *mixed])


@examples(300, suppress_health_check=list(HealthCheck))
@given(st.text(st.one_of(st.sampled_from(ODD + "sStTlLdDmMrReEvV'''' \n\t"), st.characters(exclude_categories=["Cs"]))))
def test_pieces_of_any_text(text):
    for pattern, (ranked, backend) in by_pattern().items():
        (mine,) = ranked.encode([text])
        assert mine is None or mine == backend.encode(text, add_special_tokens=False).ids, pattern
        assert mine is not None or any(c >= "\U00040000" for c in text)


@cache
def by_pattern():
    """The encoder and the backend that it stands for, of each pattern."""
    model = json.loads(train_tokenizer([ODD, write_text(0, 100)], 400).backend.to_str())["model"]
    found = {}
    for pattern in sorted(_PATTERNS):
        backend = backend_of(model["vocab"], [tuple(pair) for pair in model["merges"]], pattern)
        found[pattern] = RankedBpe(ranks_of(backend)), backend
    return found


def test_every_character_after_an_apostrophe():
    """Both engines fold case alike there, of all characters."""
    text = "".join(f"'{chr(c)}" for c in range(0x11000) if not 0xD800 <= c < 0xE000)
    for pattern in (SPLIT_PATTERN, min(_PATTERNS, key=len)):
        ranked, backend = by_pattern()[pattern]
        assert classes_agree(pattern)
        assert ranked.encode([text]) == [backend.encode(text, add_special_tokens=False).ids]


@pytest.mark.parametrize(
    "text",
    [
        *("a" * 300_000, "漢" * 70_000),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("." * 210_000, "1" * 50_000, " x" * 60_000 + " " * 99_000)
        ),
    ],
)
def test_long_words(text):
    for ranked, backend in by_pattern().values():
        assert ranked.encode([text]) == [backend.encode(text, add_special_tokens=False).ids]


def test_white_space_that_the_engine_cannot_go_back_through_is_left_out():
    assert by_pattern()[SPLIT_PATTERN][0].encode([" " * 1_500_000 + "x"]) == [None]


def test_gpt2s_own_pre_tokenizer():
    _, backend = by_pattern()[SPLIT_PATTERN]
    backend = Tokenizer.from_str(backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    assert not assert_same(backend, [ODD, write_text(4, 100)])


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_normalizers(form):
    backend = Tokenizer.from_str(by_pattern()[SPLIT_PATTERN][1].to_str())
    backend.normalizer = getattr(normalizers, form)()
    assert not assert_same(backend, [ODD, "e\u0301 Å ﬁ ＡＢ", "plain text"])


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_texts_with_tokens_of_the_users_are_left_out(special, normalized):
    """Names of special tokens are text; names of others are tokens, which tiktoken does not know."""
    backend = Tokenizer.from_str(by_pattern()[SPLIT_PATTERN][1].to_str())
    backend.normalizer = normalizers.NFC()
    token = AddedToken("<é>", special=special, normalized=normalized)
    (backend.add_special_tokens if special else backend.add_tokens)([token])
    backend.encode_special_tokens = True
    left = assert_same(backend, ["a <é> b", "a <e\u0301> b", "a b", "é", "<"])
    assert left == ([] if special else ["a <é> b", "a <e\u0301> b"])


def test_what_is_left_to_tokenizers():
    _, backend = by_pattern()[SPLIT_PATTERN]

    def reason(change):
        state = json.loads(backend.to_str())
        change(state)
        found = ranks_of(Tokenizer.from_str(json.dumps(state)))
        assert isinstance(found, str), change
        return found

    model = {"dropout": 0.5}
    assert "no plain BPE" in reason(lambda s: s["model"].update(model))
    assert "suffix" in reason(lambda s: s["model"].update(end_of_word_suffix="</w>"))
    assert "normalizer is Lowercase" in reason(lambda s: s.update(normalizer={"type": "Lowercase"}))
    assert "pre-tokenizer" in reason(lambda s: s.update(pre_tokenizer=None))
    assert "pre-tokenizer" in reason(lambda s: s["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True))
    assert "pre-tokenizer" in reason(
        lambda s: s["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+|\W+")
    )
    assert "pre-tokenizer" in reason(lambda s: s["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"))
    bytes_left = {"vocab": {"a": 0, "b": 1}, "merges": []}
    assert "each byte" in reason(lambda s: s["model"].update(bytes_left))
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    assert "no plain BPE" in reason(lambda s: s.update(model=words))
