"""A tokenizer in the words of llama.cpp: tokens, merges, and the name of the pattern that splits text before them.

llama.cpp has a fixed list of patterns, each with a name; a tokenizer with another pattern would get other ids there, so
it is not written. What is compared is the tokenizer.json itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.data.common.tokenizer import SPLIT_PATTERN, Tokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {SPLIT_PATTERN: "qwen2", _LLAMA3: "llama-bpe"}
_BYTE_LEVEL = "gpt-2"
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


def why_no_vocabulary(tokenizer: Tokenizer) -> str | None:
    """Why llama.cpp would give other ids than this tokenizer; None where it gives the same."""
    raw = json.loads(tokenizer.backend.to_str())
    if raw["model"].get("type") != "BPE" or raw["model"].get("byte_fallback"):
        return f"llama.cpp's byte-level BPE is written only, and the tokenizer is {raw['model'].get('type')}"
    pattern = _pattern(raw)
    if pattern is None:
        return (
            "llama.cpp has a fixed list of patterns that split text, and this tokenizer's is none that is written here "
            f"({', '.join([*_PATTERNS.values(), _BYTE_LEVEL])}): it would get other token ids"
        )
    normalizer = (raw.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        return f"llama.cpp does not have the tokenizer's normalizer {normalizer}"
    if bool(raw["model"].get("ignore_merges")) != (pattern in _WHOLE_WORDS_FIRST):
        return f"ignore_merges = {raw['model'].get('ignore_merges')} is not what llama.cpp does for {pattern}"
    return None


def vocabulary(tokenizer: Tokenizer, size: int, trained_here: bool) -> Vocabulary:
    """The tokenizer's vocabulary, filled up to the `size` of the model's embedding.

    Args:
        tokenizer: one that `why_no_vocabulary` has no reason against.
        size: rows of the embedding.
        trained_here: documents began with the begin token; else the tokenizer's own rule says whether texts do.
    """
    raw = json.loads(tokenizer.backend.to_str())
    tokens, kinds = [f"[unused {i}]" for i in range(size)], ["unused"] * size
    for token, i in raw["model"]["vocab"].items():
        tokens[i], kinds[i] = token, "normal"
    for added in raw.get("added_tokens", ()):
        i = added["id"]
        tokens[i], kinds[i] = added["content"], "control" if added["special"] else "user"
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]]
    begun = tokenizer.backend.encode("a", add_special_tokens=True).ids[:1] == [tokenizer.bos_id]
    return Vocabulary(tokens, kinds, pairs, _pattern(raw) or "", trained_here or begun)


def _pattern(raw: dict[str, Any]) -> str | None:
    """llama.cpp's name of the pattern of a tokenizer.json."""
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
