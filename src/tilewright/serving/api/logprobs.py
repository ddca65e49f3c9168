"""Log-probabilities as OpenAI's API tells them: tokens as text and as bytes."""

from collections.abc import Sequence
from typing import Any

from tilewright.data.common.tokenizer import Tokenizer
from tilewright.serving.next_token import Drawn

_LEAST = -9999.0
"""Number that OpenAI's API tells for a probability of 0, since JSON has no infinity."""


class TokenTexts:
    """Text and bytes of single tokens.

    Args:
        tokenizer: of the model.

    Example:
        >>> from tilewright.data.common.tokenizer import train_tokenizer
        >>> tok = train_tokenizer(["low lower " * 9], 270)
        >>> texts = TokenTexts(tok)
        >>> [texts.bytes_of(i) for i in tok.encode("é")]
        [b'\\xc3', b'\\xa9']
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._special_ids = tokenizer, frozenset(tokenizer.special_ids)
        self._byte_level = _decodes_bytes(tokenizer)

    def text_of(self, token: int) -> str:
        """The text of a token, reported with its log-probability; the name of a special token. A part of a character
        becomes replacement characters."""
        return self.bytes_of(token).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, reported with its log-probability."""
        name = self._tokenizer.backend.id_to_token(token)
        if name is None:
            return b""
        if token in self._special_ids:
            return name.encode()
        if self._byte_level and all(char in _BYTES for char in name):
            return bytes(_BYTES[char] for char in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()


def _decodes_bytes(tokenizer: Tokenizer) -> bool:
    return "ByteLevel" in str(tokenizer.backend.decoder)


def _byte_names() -> dict[str, int]:
    """The byte that each character of a byte-level tokenizer's vocabulary means (GPT-2's table)."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTES = _byte_names()


def of_chat(texts: TokenTexts, tokens: Sequence[Drawn]) -> dict[str, Any]:
    """Log-probabilities as the object of /v1/chat/completions."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        found = texts.bytes_of(token)
        return {"token": found.decode("utf-8", "replace"), "logprob": max(logprob, _LEAST), "bytes": list(found)}

    content = [one(drawn.id, drawn.logprob) | {"top_logprobs": [one(*pair) for pair in drawn.top]} for drawn in tokens]
    return {"content": content, "refusal": None}


def of_text(texts: TokenTexts, tokens: Sequence[Drawn], offset: int) -> dict[str, Any]:
    """Log-probabilities as the object of /v1/completions; `offset` is where the first token's text begins."""
    names = [texts.text_of(drawn.id) for drawn in tokens]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": [max(drawn.logprob, _LEAST) for drawn in tokens],
        "top_logprobs": [{texts.text_of(i): max(logprob, _LEAST) for i, logprob in drawn.top} for drawn in tokens],
        "text_offset": offsets,
    }
