"""Arrays that are appended to on disk: .npy files whose length is known only at the end."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

_HEADER_BYTES = 128


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype of token ids in a .npy file: uint16 where every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class NpyWriter:
    """Appends to a .npy file whose length is known only at the end. A context manager.

    Args:
        path: the file.
        dtype: of its numbers.
        shape: of one entry.
    """

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...] = ()):
        self._file, self._dtype, self._shape, self._length = path.open("wb"), dtype, shape, 0

    def append(self, values: Sequence[int] | np.ndarray) -> None:
        self._file.write(np.asarray(values, self._dtype).tobytes())
        self._length += len(values)

    def __enter__(self) -> "NpyWriter":
        self._file.write(bytes(_HEADER_BYTES))  # the place of the header
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._file.seek(0)
            self._file.write(_npy_header(self._dtype, (self._length, *self._shape)))
        self._file.close()


def _npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """The header of a .npy file, version 1.0, of a fixed size: magic, its length, the description padded with
    blanks."""
    start = b"\x93NUMPY\x01\x00"
    room = _HEADER_BYTES - len(start) - 2
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    return start + room.to_bytes(2, "little") + text.ljust(room - 1).encode("ascii") + b"\n"
