"""Texts of tasks to token ids and back, as the harness does it for a Hugging Face model.

Names of special tokens in a text are these tokens: a rendered chat template needs it. What begins a text is decided by
the tokenizer's files, as in transformers; a model that was trained here from random weights gets the begin of a
document, which stood before each document that it has seen.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers

from tilewright.data.chat.load import named_tokens
from tilewright.data.common.guarded_tokenizer import Reader, reader_of
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.data.common.tokenizer_folder import CONFIG


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer as the harness uses it.

    Args:
        backend: reads names of special tokens as these tokens.
        eos_id: ends a text.
        prefix_id: what an empty context becomes, and what a text is scored from.
        prefixed: whether `prefix_id` begins every text; None: the tokenizer's own template decides.
    """

    backend: tokenizers.Tokenizer
    eos_id: int
    prefix_id: int
    prefixed: bool | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: Path | None) -> "TextCodec":
        """The codec of a model's text for lm_eval.

        Args:
            tokenizer: of the model.
            folder: with the files of a published tokenizer; None: it was trained here.
        """
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        if folder is None:
            return cls(backend, tokenizer.eos_id, tokenizer.bos_id, True)
        named = named_tokens(folder)
        prefix_id = tokenizer.bos_id if "bos_token" in named else tokenizer.eos_id
        return cls(backend, tokenizer.eos_id, prefix_id, _declared_prefix(folder))

    @cached_property
    def _reader(self) -> Reader:
        return reader_of(self.backend)

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Ids of a text for lm_eval.

        Args:
            text: any text.
            special: with the tokens that begin and end a text; None: unless the text has the first of them already.
        """
        begun = text.startswith(self.decode([self.prefix_id], skip_special=False))
        if special is False or (special is None and begun):
            return self._reader.encode(text).ids
        if self.prefixed is None:
            return self._reader.encode(text, special=True).ids
        ids = self._reader.encode(text).ids
        return [self.prefix_id, *ids] if self.prefixed else ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of ids for lm_eval."""
        return self._reader.decode(ids, skip_special)


def _declared_prefix(folder: Path) -> bool | None:
    """The tokenizer folder's `add_bos_token`; None if neither it nor `add_eos_token` is there (as transformers reads
    it)."""
    if not (folder / CONFIG).is_file():
        return None
    values = json.loads((folder / CONFIG).read_bytes())
    if "add_bos_token" in values or "add_eos_token" in values:
        return bool(values.get("add_bos_token")) and "bos_token" in named_tokens(folder)
    return None
