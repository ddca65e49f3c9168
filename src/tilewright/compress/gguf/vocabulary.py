"""A tokenizer in the words of llama.cpp: tokens, merges, and the name of the pattern that splits text before them.

llama.cpp has a fixed list of patterns, each with a name; a tokenizer with another pattern would get other ids there, so
it is not written. Nor does it normalise: of a tokenizer that does, text gets other ids unless callers do it. What is
compared is the tokenizer.json itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.compress.gguf.added_tokens import why_other_order
from tilewright.data.common.tokenizer import SPLIT_PATTERN, Tokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {SPLIT_PATTERN: "qwen2", _LLAMA3: "llama-bpe"}
_BYTE_LEVEL = "gpt-2"
_PLAIN = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_EDGES = ("lstrip", "rstrip", "single_word")
_WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Patterns with which llama.cpp takes a word that is in the vocabulary as one token (`ignore_merges`)."""


@dataclass(frozen=True)
class Vocabulary:
    """Token texts by id; `kinds` are "normal", "control", "user" or "unused"; merges as pairs."""

    tokens: Sequence[str]
    kinds: Sequence[str]
    merges: Sequence[str]
    pattern: str
    add_bos: bool
    add_eos: bool


def normal_form(tokenizer: Tokenizer) -> str:
    """The Unicode form that a vocabulary's tokenizer brings text into: "NFC", or "" where it leaves text as it is.
    Another normalizer's names, with + between them."""
    return "+".join(_normalizers(json.loads(tokenizer.backend.to_str()).get("normalizer")))


def why_no_vocabulary(
    tokenizer: Tokenizer, begin: Sequence[int] = (), end: Sequence[int] = (), *, normalized: bool = False
) -> str | None:
    """Why llama.cpp has no vocabulary that gives the ids of this tokenizer; None where it gives the same.

    Args:
        tokenizer: of the run.
        begin, end: ids that it puts around a text.
        normalized: callers give text in the tokenizer's Unicode form.
    """
    # 1. The model and the pattern that splits text before its merges.
    raw = json.loads(tokenizer.backend.to_str())
    if raw["model"].get("type") != "BPE" or raw["model"].get("byte_fallback"):
        return f"llama.cpp's byte-level BPE is written only, and the tokenizer is {raw['model'].get('type')}"
    pattern = _pattern(raw)
    if pattern is None:
        return (
            "llama.cpp has a fixed list of patterns that split text, and this tokenizer's is none that is written here "
            f"({', '.join([*_PATTERNS.values(), _BYTE_LEVEL])}): it would get other token ids"
        )
    # 2. What is done to a text before it is split: its Unicode form, tokens around it.
    form = normal_form(tokenizer)
    if form not in ("", "NFC"):
        return f"llama.cpp does not have the tokenizer's normalizer {form}"
    if form and not normalized:
        return (
            f"the tokenizer brings text into {form} and llama.cpp does not, so that text with decomposed letters would "
            "get other token ids; --normalized-text writes it for callers who normalise"
        )
    if list(begin) not in ([], [tokenizer.bos_id]) or list(end) not in ([], [tokenizer.eos_id]):
        return f"llama.cpp puts one token before and after a text, and the tokenizer {list(begin)} and {list(end)}"
    # 3. The merges and the added tokens.
    odd = [name for name in _PLAIN if raw["model"].get(name)]
    if odd:
        return f"llama.cpp's BPE has no {', '.join(odd)}"
    strict = [t["content"] for t in raw.get("added_tokens", ()) if not t["special"] and any(t.get(f) for f in _EDGES)]
    if strict:
        return f"llama.cpp takes tokens as they are, and {strict[0]!r} also takes blanks beside it or whole words only"
    if (order := why_other_order(raw.get("added_tokens", ()))) is not None:
        return order
    if bool(raw["model"].get("ignore_merges")) != (pattern in _WHOLE_WORDS_FIRST):
        return f"ignore_merges = {raw['model'].get('ignore_merges')} is not what llama.cpp does for {pattern}"
    return None


def vocabulary(tokenizer: Tokenizer, size: int, begin: Sequence[int], end: Sequence[int]) -> Vocabulary:
    """The tokenizer's vocabulary for GGUF, filled up to the `size` of the model's embedding.

    Args:
        tokenizer: one that `why_no_vocabulary` has no reason against.
        size: rows of the embedding.
        begin, end: ids that it puts around a text.
    """
    raw = json.loads(tokenizer.backend.to_str())
    tokens, kinds = [f"[unused {i}]" for i in range(size)], ["unused"] * size
    for token, i in raw["model"]["vocab"].items():
        tokens[i], kinds[i] = token, "normal"
    for added in raw.get("added_tokens", ()):
        i = added["id"]
        tokens[i], kinds[i] = added["content"], "control" if added["special"] else "user"
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]]
    return Vocabulary(tokens, kinds, pairs, _pattern(raw) or "", bool(begin), bool(end))


def _normalizers(raw: dict[str, Any] | None) -> list[str]:
    """Names of the steps of a tokenizer.json's normalizer, for llama.cpp's vocabulary."""
    if not raw:
        return []
    if raw.get("type") == "Sequence":
        return [name for step in raw["normalizers"] for name in _normalizers(step)]
    return [str(raw.get("type"))]


def _pattern(raw: dict[str, Any]) -> str | None:
    """llama.cpp's name of the pre-tokenizer pattern of a vocabulary's tokenizer.json."""
    steps = raw.get("pre_tokenizer") or {}
    match steps.get("pretokenizers", [steps]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _BYTE_LEVEL
        case [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return _PATTERNS.get(regex)
    return None
