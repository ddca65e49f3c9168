"""Text to ids and back by a tokenizer that a model's folder brought, which is not trusted with the process.

A pattern of a pre-tokenizer may backtrack for hours on a line of text, a normalizer may write a gigabyte for each
letter, and a panic of the library is no `Exception`. Tokenizers whose patterns are those of published families run
here; all others in a process under limits (`limited_process`). A panic, or a text that takes too much, is an error of
that text.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import tokenizers

from tilewright.core.errors import DataError
from tilewright.data.common.limited_process import Kept, KilledError, LimitedProcess, serve
from tilewright.data.common.ranked_bpe import RankedBpe

_WORDS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PROVEN = frozenset(
    (
        *(
            r"\p{N}",
            r"\p{N}{1,3}",
            r"\d",
            r"\d{1,3}",
            r"[0-9]",
            r"[0-9][0-9][0-9]",
            r"\s+",
            r"\s",
            r" {2,}",
            r"\n",
            " ",
        ),
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(rf"{_SHORT}|{_WORDS}\p{{L}}+|\p{{N}}{n}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}" for n in ("", "+", "{1,3}")),
        rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        *(
            rf"{_WORDS}{_UPPER}*{_LOWER}+{short}|{_WORDS}{_UPPER}+{_LOWER}*{short}|\p{{N}}{n}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
            for short, n in (("", ""), (f"{_SHORT}?", "{1,3}"))
        ),
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}",
    )
)
"""Patterns of published tokenizers. A test shows that each takes time in proportion to the text."""
_GROWTH = 16.0
"""Times that what is replaced by a text may grow in all."""
_CPU_S, _CHARS_PER_S = 5.0, 2e5
"""Processor seconds of one request, and characters for which it gets one more; usual tokenizers read millions."""
_LOADED_PER_S = 2e6  # characters of a tokenizer.json
_MEMORY_BYTES, _BYTES_PER_CHAR = 2 << 30, 600
_KEPT = 4


class TokenizerError(DataError):
    """A tokenizer that fails on a text, or takes too much for it."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a text, and the characters [first, last) that each stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Reader(Protocol):
    """Encodes text to token ids and back by a tokenizer that is not trusted.

    Raises:
        TokenizerError: the tokenizer fails.
    """

    def encode(self, text: str, special: bool = False) -> Encoded:
        """Encode one text by the guarded tokenizer; `special`: with what it puts around it."""
        ...

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids alone of many texts by the guarded tokenizer."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode many texts by the guarded tokenizer."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decode token ids by the guarded tokenizer."""
        ...


def reader_of(backend: tokenizers.Tokenizer, ranked: RankedBpe | None = None) -> Reader:
    """Choose where a tokenizer encodes: in this process if its patterns are `PROVEN`, else in one of its own.

    Args:
        backend: not to be changed from now on.
        ranked: encodes batches, where the ids alone are wanted.

    Example:
        >>> from tilewright.data.common.tokenizer import train_tokenizer
        >>> type(reader_of(train_tokenizer(["hello you " * 9], 300).backend)).__name__
        'Direct'
    """
    parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    states = [json.loads(part.__getstate__()) for part in parts if part is not None]
    return Direct(backend, ranked) if why_not_proven(states) is None else Limited(backend)


def why_not_proven(state: Any) -> str | None:
    """Explain why a tokenizer needs a guard: the first pattern of its tokenizer.json that is not in `PROVEN`, or a text
    that grows; None: neither."""
    found = list(_replacements([state]))
    unknown = next((regex for regex, _ in found if regex is not None and regex not in PROVEN), None)
    if unknown is not None:
        return f"pattern {unknown[:200]!r}"
    growth = math.prod(max(1.0, factor) for _, factor in found)
    return f"texts that grow {growth:.3g} times" if growth > _GROWTH else None


def _replacements(state: dict[str, Any] | list[Any]) -> Iterator[tuple[str | None, float]]:
    """The replacements in a tokenizer.json: the pattern of each part that has one, None where it is a text; and how
    much longer the replaced text becomes."""
    if isinstance(state, dict):
        pattern, content = state.get("pattern"), state.get("content", "")
        if isinstance(pattern, dict):
            text = pattern.get("String")
            yield pattern.get("Regex"), len(content) / (len(text) if text else 1)
        elif state.get("type") == "Prepend":
            yield None, float(len(str(state.get("prepend", ""))))
    values = state.values() if isinstance(state, dict) else state
    for value in values:
        if isinstance(value, (dict, list)):  # a vocabulary has thousands of others
            yield from _replacements(value)


@contextmanager
def failures_told(what: str) -> Iterator[None]:
    """Errors of the tokenizers library, its panics too, as errors of the guarded tokenizer.

    Args:
        what: could not be done.
    """
    try:
        yield
    except BaseException as error:
        panic = type(error).__module__ == "pyo3_runtime"
        if not panic and type(error) is not Exception:  # the library raises these two
            raise
        raise _failed(what, str(error)) from None


def _failed(what: str, got: str) -> TokenizerError:
    return TokenizerError(
        what,
        got=(got.splitlines() or [""])[0][:200],
        need="a tokenizer that reads every text, as published ones do",
        try_="the tokenizer.json of the model's publisher",
        where="tokenizer.json",
    )


@dataclass(frozen=True)
class Direct:
    """Reads texts by a tokenizer in this process."""

    backend: tokenizers.Tokenizer
    ranked: RankedBpe | None = None

    def encode(self, text: str, special: bool = False) -> Encoded:
        """Encode one text by a tokenizer that needs no guard: see `Reader`."""
        with failures_told("Tokenizer fails on a text"):
            found = self.backend.encode(text, add_special_tokens=special)
            return Encoded(found.ids, found.offsets)

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts by a tokenizer that needs no guard; see `Reader`; on all cores."""
        with failures_told("Tokenizer fails on a text"):
            if self.ranked is None:
                return self._ids(texts)
            found = self.ranked.encode(texts)
            others = iter(self._ids([text for text, ids in zip(texts, found, strict=True) if ids is None]))
            return [next(others) if ids is None else ids for ids in found]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode many texts by a tokenizer that needs no guard; see `Reader`; on all cores."""
        with failures_told("Tokenizer fails on a text"):
            found = self.backend.encode_batch(list(texts), add_special_tokens=False)
            return [Encoded(one.ids, one.offsets) for one in found]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decode ids by a tokenizer that needs no guard: see `Reader`."""
        with failures_told("Tokenizer fails on token ids"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special)


@dataclass(frozen=True)
class Limited:
    """Reads texts in the process of tokenizers, under its limits."""

    backend: tokenizers.Tokenizer

    def encode(self, text: str, special: bool = False) -> Encoded:
        """Encode one text by a guarded tokenizer's process: see `Reader`."""
        return self._encoded([text], special, True)[0]

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts to ids by a guarded tokenizer's process: see `Reader`."""
        return [found.ids for found in self._encoded(texts, False, False)]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode many texts by a guarded tokenizer's process: see `Reader`."""
        return self._encoded(texts, False, True)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decode ids by a guarded tokenizer's process: see `Reader`."""
        return self._call(16 * len(ids), ids=[int(i) for i in ids], skip=skip_special)["text"]

    def _encoded(self, texts: Sequence[str], special: bool, offsets: bool) -> list[Encoded]:
        size = sum(map(len, texts))
        found = self._call(size, texts=list(texts), special=special, offsets=offsets)
        pairs = found["offsets"] or [[]] * len(texts)
        return [Encoded(ids, [(a, b) for a, b in own]) for ids, own in zip(found["ids"], pairs, strict=True)]

    def _call(self, size: int, **request: Any) -> dict[str, Any]:
        return ask_process(self._state, size, key=self._key, **request)

    @cached_property
    def _state(self) -> dict[str, Any]:
        return {"tokenizer": self.backend.to_str(), "names": not self.backend.encode_special_tokens}

    @cached_property
    def _key(self) -> str:
        return _key_of(self._state)


def check_loadable(text: str) -> None:
    """Check that a tokenizer.json can be loaded: in the guarded process first, where a pattern in it is none of
    `PROVEN`.

    Args:
        text: of the file.

    Raises:
        TokenizerError: it takes too much, or is none.
    """
    if '"Regex"' in text and why_not_proven(_parsed(text)) is not None:
        state = {"tokenizer": text, "names": False}
        ask_process(state, 0, key=_key_of(state), texts=[], special=False, offsets=False)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _failed("Tokenizer cannot be read", str(error)) from None


def ask_process(state: dict[str, Any], size: int, *, key: str, **request: Any) -> dict[str, Any]:
    """Ask the process of guarded tokenizers; its answer.

    Args:
        state: of the tokenizer.
        size: characters of the request.
        key: of the state.
        request: see `_answers`.

    Raises:
        TokenizerError: it fails, or takes too much.
    """
    length = len(state["tokenizer"])
    cpu_s = _CPU_S + size / _CHARS_PER_S + length / _LOADED_PER_S
    memory_bytes = _MEMORY_BYTES + _BYTES_PER_CHAR * (size + length // 8)
    try:
        found = tokenizer_process(os.getpid()).call(cpu_s, memory_bytes, key, lambda: state, **request)
    except KilledError as error:
        limits = f"more than {cpu_s:.3g} processor seconds or {memory_bytes / 2**20:.0f} MiB for {size} characters"
        raise _failed(
            "Tokenizer takes too much time or memory", f"{limits}; its process ended with signal {error.signal}"
        ) from None
    if "error" in found:
        raise _failed("Tokenizer fails on a text", found["error"])
    return found


def _key_of(state: dict[str, Any]) -> str:
    return hashlib.sha256(f"{state['names']}{state['tokenizer']}".encode("utf-8", "surrogatepass")).hexdigest()


@lru_cache(maxsize=1)
def tokenizer_process(pid: int) -> LimitedProcess:
    """Start the process of guarded tokenizers of the process `pid`, the caller's own (see `readers.parser_process`)."""
    assert pid == os.getpid()
    return LimitedProcess(__name__)


def _loaded(given: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(given["tokenizer"])
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = not given["names"]
    return backend


def _answers() -> Any:
    """Answer requests in the guarded tokenizer's process: encode `texts`, or decode `ids`."""
    kept = Kept(_loaded, _KEPT)

    def answer(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with failures_told("Tokenizer fails"):
                backend = kept.of(request)
                if backend is None:
                    found = kept.unknown()
                elif "ids" in request:
                    found = {"text": backend.decode(request["ids"], skip_special_tokens=request["skip"])}
                else:
                    encoded = [backend.encode(text, add_special_tokens=request["special"]) for text in request["texts"]]
                    offsets = [one.offsets for one in encoded] if request["offsets"] else []
                    found = {"ids": [one.ids for one in encoded], "offsets": offsets}
        except (TokenizerError, MemoryError, TypeError) as error:
            found = {"error": error.problems[0].got if isinstance(error, TokenizerError) else type(error).__name__}
        yield found

    return answer


def encode_piece(reader: Reader, text: str, within: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode a piece of text by the guarded tokenizer: ids and ranges. A piece `within` a text gets no mark of a text's
    beginning: it is encoded after a line end, whose ids are then taken away (as transformers does)."""
    if within:
        line = reader.encode("\n")
        found = reader.encode("\n" + text)
        if found.ids[: len(line.ids)] == line.ids:
            kept = slice(len(line.ids), None)
            return found.ids[kept], [(max(0, a - 1), max(0, b - 1)) for a, b in found.offsets[kept]]
    found = reader.encode(text)
    return found.ids, found.offsets


if __name__ == "__main__":
    serve(_answers())
