"""Text from tokens: pieces that join to what decoding all at once gives, and stop strings that never come out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tests.data.chat.families import make_folder
from tilewright.data.common.tokenizer import load_tokenizer, train_tokenizer
from tilewright.serving.token_text import StopFilter, TextStream


class Metaspace:
    """A tokenizer as SentencePiece's: words begin with a mark, rare characters are bytes."""

    def __init__(self):
        words = ["▁hello", "▁you", "low", "▁"] + [f"<0x{i:02X}>" for i in range(256)]
        self.backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
        self.backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )

    def decode(self, ids):
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


BYTES = train_tokenizer(["low lower lowest you are naïve " * 20], 300)
MARKS = Metaspace()


def pieces(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [stream.push(i) for i in ids] + [stream.flush()]


@given(ids=st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=30))
def test_pieces_of_any_tokens_join_to_the_whole_text(ids):
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)


WORDS = st.integers(0, 3).map(lambda i: [i])
CHARACTERS = st.characters(exclude_categories=["Cs"]).map(lambda c: [4 + byte for byte in c.encode()])


@given(parts=st.lists(WORDS | CHARACTERS, max_size=20))
def test_marks_of_words_and_bytes_of_characters_join_to_the_whole_text(parts):
    ids = [i for part in parts for i in part]
    assert "".join(pieces(MARKS, ids)) == MARKS.decode(ids)


@given(text=st.text(max_size=40))
def test_no_piece_of_a_text_is_half_a_character(text):
    ids = BYTES.encode(text)
    found = pieces(BYTES, ids)
    assert "".join(found) == text
    assert text.count("\ufffd") == "".join(found).count("\ufffd")


@pytest.mark.parametrize("family", ["llama3", "mistral", "gemma", "chatml"])
def test_families(family, tmp_path):
    make_folder(tmp_path, family)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("hello you are, in Paris: 42!\n  questions 🦊 é")
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


LETTERS = st.text("abc", max_size=40)


@given(text=LETTERS, stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), data=st.data())
def test_a_stop_string_ends_the_text_wherever_it_is_split(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop = StopFilter(stops)
    given_out = ""
    for part in parts:
        given_out += stop.push(part)
        assert not any(one in given_out for one in stops)
    given_out += stop.flush()
    expected, stopped = letter_by_letter(text, stops)
    assert (given_out, stop.stopped) == (expected, stopped)


def letter_by_letter(text, stops):
    """By definition: the first end of a stop string ends the text, and the longest that ends there is cut off."""
    for end in range(1, len(text) + 1):
        found = [one for one in stops if text[:end].endswith(one)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


def test_of_stop_strings_within_each_other_the_first_complete_one_counts():
    for parts in (["abcd"], list("abcd"), ["ab", "cd"]):
        stop = StopFilter(["abcd", "bc"])
        assert "".join(stop.push(part) for part in parts) == "a"


@given(before=st.lists(WORDS | CHARACTERS, max_size=12), parts=st.lists(WORDS | CHARACTERS, max_size=12))
def test_a_continued_text_and_its_beginning_are_the_text_of_all_ids(before, parts):
    before, ids = [i for part in before for i in part], [i for part in parts for i in part]
    stream = TextStream(MARKS, before)
    text = "".join([stream.push(i) for i in ids] + [stream.flush()])
    assert MARKS.decode(before) + text == MARKS.decode([*before, *ids])


def test_a_context_that_would_begin_within_a_character_is_longer():
    for count in range(1, 13):
        before = [0] + [4 + byte for byte in ("é€🦊" * 4)[:count].encode()]
        stream = TextStream(MARKS, before)
        assert "".join(stream.push(i) for i in [*(4 + byte for byte in "é".encode()), 1]) == "é you"
