r"""Ids of a byte-level BPE by tiktoken, equal to those of `tokenizers` by construction, several times as fast.

The two merge by other rules. `tokenizers` (H) has a list of pairs and merges, of the neighbours that are in it, the
pair that stands first, the leftmost of equal ones. tiktoken (T) has ranks of strings and merges, of the neighbours
whose union has a rank, those with the lowest, the leftmost of equal ones. A piece that has a rank as a whole is one
token at once. From a list of pairs, `ranks_of` makes the ranks with which T is H. It gives a rank to

    each byte, and each string w that H, applied to w alone, makes one token of: the place in the list of the pair that
    H merges last there.

Proof. H and T start at the same state, the bytes. Let both be in one state, and let x, y be neighbours in it, w = xy.
Both ends of w are ends of tokens now, and have been ever since, for ends only vanish. So every merge inside w was the
first in the order (place in the list, position) among all candidates, hence among those inside w, and no merge that
touches w crossed its ends: inside w the state is one that H passes through when applied to w alone. A state of two
tokens of w is the last but one at most, and there is only one such state.
  - If w has a rank, H makes w of w alone, so (x, y) is the pair that it merges last: it is in the list, at the place
    that is the rank of w.
  - If (x, y) is in the list, H applied to w alone gets to (x, y) and merges it, for there is no other candidate: w is
    one token, and has a rank, which is the place of (x, y).
So both have the same candidates with the same places, and take the same one, for equal places are equal pairs and the
leftmost wins in both. By induction they pass through the same states and stop at the same one. T's shortcut for a whole
piece w gives w, as H does with w. Nothing is asked of the list: a string may come of several pairs, in any order, and
ids in any order are translated afterwards.

With `ignore_merges` H, too, takes a piece that is in the vocabulary at once. So these strings have ranks although H may
not make one token of them by merges. In T they could then be a union: of x, y as above, where H applied to w stops at
two tokens. Where it stops at more, no state has two tokens of w, and the rank is never looked at. A vocabulary with a
string of the first kind is left to `tokenizers`.

All of this is about one piece. The pieces are those of a regular expression in two libraries, which read the
expressions of `_PATTERNS` alike, as leftmost alternatives of Perl: they have no group, no reference, and only single
characters and classes. Whether both count the same characters into each class is tried out over all of Unicode's
assigned planes; case is folded only of letters after an apostrophe, into which no character is folded. Each character
is in a piece. Texts in which a token of the user's occurs, or a character of a plane without any, go to `tokenizers`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from tilewright.core import env

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_OF_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PATTERNS = frozenset(
    (
        _OF_BYTE_LEVEL,
        *(
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{n}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
            for n in ("", "+", "{1,3}")
        ),
    )
)
"""Expressions that both libraries read alike: GPT-2's, cl100k's, which Llama 3 has, and Qwen's, which is ours."""
_PLANES = (*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000))
_UNASSIGNED = re.compile("[\U00040000-\U000dffff\U000e1000-\U0010ffff]")
_LONG, _MOST_SPACES = 200_000, 100_000
"""Characters from which a text is searched for white space that tiktoken's engine cannot go back through, and the
longest that it gets; it fails at a million."""
_SPACE_RUN = re.compile(r"\s+")
_KEEPS_ASCII = ("NFC", "NFD", "NFKC", "NFKD")


@dataclass(frozen=True)
class MergeRanks:
    """The input of tiktoken for a byte-level BPE: its pattern, merge ranks and ids.

    Args:
        pattern: of the pieces.
        rank_of: of each string of bytes.
        ids: the tokenizer's id at each rank, uint32.
        avoided: a text that holds one of these strings is not for tiktoken.
        normalizer: of texts, None where they are taken as they are.
        ascii_stays: ASCII is left as it is by the normalizer.
    """

    pattern: str
    rank_of: dict[bytes, int]
    ids: np.ndarray = field(repr=False)
    avoided: tuple[str, ...]
    normalizer: normalizers.Normalizer | None
    ascii_stays: bool


class RankedBpe:
    """Encodes texts with tiktoken.

    Args:
        ranks: see `ranks_of`.
    """

    def __init__(self, ranks: MergeRanks):
        import tiktoken

        self._ranks = ranks
        self._encoding = tiktoken.Encoding(
            "ranked", pat_str=ranks.pattern, mergeable_ranks=ranks.rank_of, special_tokens={}
        )

    @cached_property
    def name(self) -> str:
        """Name of the library that encodes by ranked BPE (tiktoken), with its version."""
        return f"tiktoken {tiktoken_version()}"

    def encode(self, texts: Sequence[str]) -> list[list[int] | None]:
        """Ids of each text by ranked BPE, as `tokenizers` has them; None for a text that is not for tiktoken. On all
        cores."""
        threads = min(env.tokenizer_threads(), len(texts))
        if threads < 2:
            return [self._one(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self._one, texts))

    def _one(self, text: str) -> list[int] | None:
        known = self._ranks
        if not text.isascii():
            if _UNASSIGNED.search(text):
                return None
            if known.normalizer is not None:
                if any(name in text for name in known.avoided):
                    return None
                text = known.normalizer.normalize_str(text)
        elif known.normalizer is not None and not known.ascii_stays:
            text = known.normalizer.normalize_str(text)
        if any(name in text for name in known.avoided):
            return None
        if len(text) > _LONG and max(map(len, _SPACE_RUN.findall(text)), default=0) > _MOST_SPACES:
            return None
        return known.ids[self._encoding.encode_ordinary(text)].tolist() if text else []


def ranks_of(backend: Tokenizer) -> MergeRanks | str:
    """Merge ranks of a byte-level BPE with which tiktoken gives its ids, or why there are none.

    Args:
        backend: as it encodes.

    Example:
        >>> ranks_of(Tokenizer(models.BPE()))
        'its pre-tokenizer is no known pattern before bytes'
    """
    state = json.loads(backend.to_str())
    model, normalizer = state["model"], state.get("normalizer")
    # 1. What both libraries must agree on before any merge: pattern, model, normalizer, ids, bytes, classes.
    pattern = _pattern(state.get("pre_tokenizer"))
    if pattern is None:
        return "its pre-tokenizer is no known pattern before bytes"
    if model["type"] != "BPE" or model.get("dropout") or state.get("truncation") or state.get("padding"):
        return "it is no plain BPE"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its tokens have a prefix or a suffix"
    if normalizer is not None and normalizer["type"] not in _KEEPS_ASCII:
        return f"its normalizer is {normalizer['type']}"
    vocab: dict[str, int] = model["vocab"]
    if len(set(vocab.values())) < len(vocab):
        return "two of its tokens have one id"
    byte_of = _bytes_of_characters()
    if not byte_of.keys() <= vocab.keys():
        return "it has no token for each byte"
    if not classes_agree(pattern):
        return "the two libraries count characters into other classes"
    # 2. Ranks by the proof at the top, and from each rank back to the id.
    found = _ranks(model, byte_of)
    if isinstance(found, str):
        return found
    ids = np.zeros(max(found.values()) + 1, np.uint32)
    for text, rank in found.items():
        ids[rank] = vocab[text]
    rank_of = {bytes(byte_of[c] for c in text): rank for text, rank in found.items()}
    # 3. Texts with an added token go to `tokenizers`, also where only the normalizer makes that token.
    avoided = {t["content"] for t in state["added_tokens"] if not (t["special"] and backend.encode_special_tokens)}
    if backend.normalizer is not None:
        avoided |= {backend.normalizer.normalize_str(name) for name in avoided}
    return MergeRanks(pattern, rank_of, ids, tuple(sorted(avoided - {""})), backend.normalizer, True)


def _pattern(state: Mapping[str, Any] | None) -> str | None:
    """The pattern of a ranked BPE whose matches, as bytes, are the pieces; None where it is none of `_PATTERNS`."""
    if state is None:
        return None
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    *splits, last = parts
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not splits:
        return _OF_BYTE_LEVEL if last["use_regex"] else None
    (split, *more) = splits
    if more or last["use_regex"] or split["type"] != "Split":
        return None
    how = split["behavior"], split["invert"]
    found = split["pattern"].get("Regex")  # all is in a match, so what is between matches may be removed
    return found if how in (("Isolated", False), ("Removed", True)) and found in _PATTERNS else None


@lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, int]:
    """Map each character of a ranked BPE's vocabulary to its byte, as GPT-2 does: visible characters are themselves,
    the others follow from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _ranks(model: Mapping[str, Any], byte_of: Mapping[str, int]) -> dict[str, int] | str:
    """The rank of each string that a ranked BPE has."""
    pairs_of = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    merges = [cast(tuple[str, str], tuple(pair)) for pair in pairs_of]
    place = {pair: number for number, pair in enumerate(merges)}  # of a pair that is there twice the last one counts
    pairs: dict[str, list[tuple[str, str]]] = {}
    for pair in place:
        pairs.setdefault("".join(pair), []).append(pair)
    found = {character: byte for character, byte in byte_of.items()}
    plain = models.BPE(model["vocab"], merges)
    stopped: list[str] = []
    for text in model["vocab"]:
        if text in byte_of or not text or not all(c in byte_of for c in text):
            continue  # a byte, or what no text becomes
        parts = len(plain.tokenize(text))
        if parts == 1:
            made = pairs[text]
            found[text] = 256 + place[made[0] if len(made) == 1 else _last_pair(text, place)]
        elif model.get("ignore_merges") and parts == 2:
            return "a token of its vocabulary stands for two that are not merged"
        elif model.get("ignore_merges"):
            stopped.append(text)
    return found | {text: 256 + len(merges) + number for number, text in enumerate(stopped)}


def _last_pair(text: str, place: Mapping[tuple[str, str], int]) -> tuple[str, str]:
    """The last pair that a ranked BPE merges where `text` becomes one token."""
    parts = list(text)
    while len(parts) > 2:
        at = min(
            (i for i in range(len(parts) - 1) if (parts[i], parts[i + 1]) in place),
            key=lambda i: place[parts[i], parts[i + 1]],
        )
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


@lru_cache(maxsize=len(_PATTERNS))
def classes_agree(pattern: str) -> bool:
    """True if tiktoken's engine, for ranked BPE, and that of `tokenizers` count the same characters into each class of
    a pattern."""
    import tiktoken

    letters = sorted(set("".join(re.findall(r"\(\?i:([^)]*)\)", pattern))) - set("'|"))
    classes = sorted(set(re.findall(r"\\p\{\w+\}|\\s", pattern)))
    text = "".join(map(chr, _PLANES))
    single = {bytes([byte]): byte for byte in range(256)}
    for atoms in (classes, [f"(?i:{letter})" for letter in letters]):  # within each, no character is in two
        found, rest = [], set(text)
        for atom in atoms:
            matches = tiktoken.Encoding("class", pat_str=f"(?:{atom})+", mergeable_ranks=single, special_tokens={})
            found.append(bytes(matches.encode_ordinary(text)).decode())
            rest -= set(found[-1])
        found.append("".join(sorted(rest)))
        split = pre_tokenizers.Split(Regex("|".join(f"(?:{atom})+" for atom in atoms) or "$a"), "isolated")
        if [piece for piece, _ in split.pre_tokenize_str("".join(found))] != found:
            return False
    return True


def has_tiktoken() -> bool:
    """True if the package tiktoken is installed, for ranked BPE."""
    return find_spec("tiktoken") is not None


def tiktoken_version() -> str:
    """Version of the installed tiktoken, for ranked BPE, "" where there is none."""
    return version("tiktoken") if has_tiktoken() else ""
