"""Added tokens whose texts overlap, in llama.cpp's order and in the tokenizer's."""

from itertools import combinations, product

import pytest
from tokenizers import AddedToken, Tokenizer, models

from tests.compress.models import decoder, our_tokenizer, proof, rules_of, source
from tilewright.compress.export.gguf import F16
from tilewright.compress.export.targets import why_not
from tilewright.compress.gguf.added_tokens import why_other_order
from tilewright.compress.prove.tolerance import TOLERANCES

LETTERS = "ab"
TEXTS = ["abcdef abc abcdex abcabcdef", "x<sp>y <sp> sp <s p <spsp>", "a \n    b     c", "abcd bc abcdbc"]


def token(text, special=False, normalized=False):
    return AddedToken(text, special=special, normalized=normalized)


def backend_of(added, special):
    """The library's tokenizer of single letters and added tokens; special ones are text where `special` is false."""
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    backend.add_tokens([each for each in added if not each.special])
    backend.add_special_tokens([each for each in added if each.special])
    backend.encode_special_tokens = not special
    return backend


def by_the_tokenizer(backend, text):
    """Spans of added tokens in a text, by the library."""
    found = backend.encode(text, add_special_tokens=False)
    return [span for span, i in zip(found.offsets, found.ids, strict=True) if i >= len(LETTERS)]


def by_llama_cpp(added, text, special):
    """The same by the rule of llama.cpp's `tokenizer_st_partition`: a token after the other, the longest first."""
    free, found = [(0, len(text))], []
    for each in sorted(added, key=lambda each: -len(each.content)):
        if each.special and not special:
            continue
        pieces, free = free, []
        for start, end in pieces:
            while (at := text.find(each.content, start, end)) >= 0:
                free.append((start, at))
                found.append((at, at + len(each.content)))
                start = at + len(each.content)
            free.append((start, end))
    return sorted(found)


def words_of(lengths):
    return ["".join(word) for size in lengths for word in product("ab", repeat=size)]


def test_pairs_that_are_written_are_found_alike_in_every_text():
    """All pairs of tokens of two or three letters, their flags, texts of up to five letters, special tokens as text or
    not. More than half of the refused pairs are found otherwise in one of these texts."""
    flags = list(product([False, True], repeat=2))
    texts, refused, needed = words_of(range(6)), 0, 0
    for first, second in combinations(words_of([2, 3]), 2):
        for one, other in product(flags, repeat=2):
            added = [token(first, *one), token(second, *other)]
            rows = [{"content": each.content, "special": each.special, "normalized": each.normalized} for each in added]
            backends = {special: backend_of(added, special) for special in (True, False)}
            alike = all(
                by_llama_cpp(added, text, special) == by_the_tokenizer(backend, text)
                for text in texts
                for special, backend in backends.items()
            )
            reason = why_other_order(rows)
            assert alike or reason is not None, rows
            refused, needed = refused + (reason is not None), needed + (not alike)
    assert needed > refused / 2


REFUSED = {
    "overlap": [token("abc"), token("bcdef")],
    "a part of another that is looked for later": [token("abcd", normalized=True), token("bc")],
    "a part of a special token": [token("<sp>", special=True), token("sp")],
    "blanks behind a line's end": [token("\n  "), token("    ")],
}
WRITTEN = {
    "apart": [token("<unit>"), token("<sp>", special=True)],
    "one within another": [token("abc"), token("abcdef")],
    "runs of blanks": [token("  "), token("   "), token("     ")],
    "a special token within another": [token("<sp>", special=True), token("x<sp>y")],
}


def with_added(added):
    tokenizer = our_tokenizer()
    tokenizer.backend.add_tokens([each for each in added if not each.special])
    tokenizer.backend.add_special_tokens([each for each in added if each.special])
    return tokenizer


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_that_llama_cpp_would_take_in_another_order_are_refused(name, tmp_path):
    tokenizer = with_added(REFUSED[name])
    given = source(decoder(), tokenizer, tmp_path / "run")
    assert "takes the longest token" in (why_not(F16, given) or "it can")


@pytest.mark.parametrize("name", WRITTEN)
def test_llama_cpp_finds_the_tokens_that_are_written(name, tmp_path):
    tokenizer = with_added(WRITTEN[name])
    given = source(decoder(), tokenizer, tmp_path / "run")
    assert why_not(F16, given) is None
    written = F16.write(given, tmp_path / "model.gguf")
    asked = proof(tmp_path / "proof", given.model, tokenizer, TEXTS, **rules_of(given))
    row = asked.of(F16.consumer.module, tmp_path / "model.gguf", written.options, tolerance=TOLERANCES["gguf-f16"])
    assert row["token_ids"]["equal"] == row["token_ids"]["documents"], row["reason"]
