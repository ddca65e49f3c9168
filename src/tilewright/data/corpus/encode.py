"""Encodes the documents of a spool into two token streams on disk: training and held out.

A stream is one .npy array, memory-mapped when read: every document as begin, its tokens, end; documents of one domain
lie together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.data.common.tokenizer import Tokenizer

_BATCH_BYTES = 4 << 20
_HEADER_BYTES = 128


@dataclass(frozen=True)
class Text:
    """A document to encode: which spool document, and which of its bytes."""

    document: int
    start: int
    stop: int


def encode_stream(
    path: Path,
    texts: Sequence[Text],
    read: Callable[[Text], str],
    tokenizer: Tokenizer,
    advance: Callable[[float], None],
) -> np.ndarray:
    """Write the stream of `texts` to `path`; returns the stream length of each text (its tokens and two), int64."""
    lengths: list[int] = []
    with NpyWriter(path, token_dtype(tokenizer.vocab_size)) as out:
        for batch in _batches(texts):
            flat: list[int] = []
            for ids in tokenizer.encode_batch([read(text) for text in batch]):
                flat.append(tokenizer.bos_id)
                flat += ids
                flat.append(tokenizer.eos_id)
                lengths.append(len(ids) + 2)
            out.append(flat)
            advance(sum(text.stop - text.start for text in batch))
    return np.array(lengths, np.int64)


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _batches(texts: Sequence[Text]) -> Iterator[list[Text]]:
    batch: list[Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += text.stop - text.start
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class NpyWriter:
    """Appends to a one-dimensional .npy file whose length is known only at the end. A context manager."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file, self._dtype, self._length = path.open("wb"), dtype, 0

    def append(self, values: Sequence[int]) -> None:
        self._file.write(np.asarray(values, self._dtype).tobytes())
        self._length += len(values)

    def __enter__(self) -> "NpyWriter":
        self._file.write(bytes(_HEADER_BYTES))  # the place of the header
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._file.seek(0)
            self._file.write(_npy_header(self._dtype, self._length))
        self._file.close()


def _npy_header(dtype: np.dtype, length: int) -> bytes:
    """A version 1.0 header of a fixed size: magic, its length, the description padded with blanks."""
    start = b"\x93NUMPY\x01\x00"
    room = _HEADER_BYTES - len(start) - 2
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    return start + room.to_bytes(2, "little") + text.ljust(room - 1).encode("ascii") + b"\n"
