"""Encodes the documents of a spool into two token streams on disk: training and held out.

A stream is one .npy array, memory-mapped when read: every document as begin, its tokens, end; documents of one domain
lie together. The held-out stream has a second array beside it: the UTF-8 bytes that each token stands for.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.data.common.encoder import Spared, in_batches
from tilewright.data.common.guarded_tokenizer import TokenizerError
from tilewright.data.common.npy_writer import NpyWriter, token_dtype
from tilewright.data.common.tokenizer import Tokenizer

_BATCH_BYTES = 4 << 20


@dataclass(frozen=True)
class Text:
    """A document to encode: its number in the spool, and which of its bytes."""

    document: int
    start: int
    stop: int


def encode_stream(
    path: Path,
    texts: Sequence[Text],
    read: Callable[[Text], str],
    tokenizer: Tokenizer,
    advance: Callable[[float], None],
    *,
    sizes: Path | None = None,
    spared: Spared,
    fails: Callable[[Text, TokenizerError], None],
) -> np.ndarray:
    """Write the stream of `texts` to `path`; returns the stream length of each text (its tokens and two), int64. It is
    0 of a text that the tokenizer fails on.

    Args:
        path: the .npy file of token ids.
        texts: what to encode.
        read: gives the text.
        tokenizer: encodes it.
        advance: called with bytes done.
        sizes: a .npy file for the bytes of each token, uint32 [stream]; begin and end have none. None: not wanted.
        spared: how many texts may fail.
        fails: called with each that does.

    Raises:
        TokenizerError: too many do.
    """
    lengths: list[int] = []
    with ExitStack() as files:
        out = files.enter_context(NpyWriter(path, token_dtype(tokenizer.vocab_size)))
        out_sizes = files.enter_context(NpyWriter(sizes, np.dtype("<u4"))) if sizes is not None else None
        for batch in in_batches(texts, lambda text: text.stop - text.start, len(texts), _BATCH_BYTES):
            strings = [read(text) for text in batch]
            found: Sequence[tuple[list[int], list[int]] | TokenizerError]
            if out_sizes is not None:
                found = spared.encoded(tokenizer.encode_sized, strings)
            else:
                plain = spared.encoded(tokenizer.encode_batch, strings)
                found = [one if isinstance(one, TokenizerError) else (one, []) for one in plain]
            documents = []
            for text, one in zip(batch, found, strict=True):
                if isinstance(one, TokenizerError):
                    fails(text, one)
                    lengths.append(0)
                    continue
                ids, num_bytes = one
                documents.append(ids)
                lengths.append(len(ids) + 2)
                if out_sizes is not None:
                    out_sizes.append([0, *num_bytes, 0])
            out.append([i for ids in documents for i in (tokenizer.bos_id, *ids, tokenizer.eos_id)])
            advance(sum(text.stop - text.start for text in batch))
    return np.array(lengths, np.int64)
