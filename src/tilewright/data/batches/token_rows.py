"""Rows of text in memory-mapped files, and the batches made of them.

The stream holds every document as begin, tokens, end; a `Packing` says which ranges make a row. A batch is gathered by
one index into the stream, so it costs the same wherever its rows lie. B rows, S positions in a row.
"""

from dataclasses import dataclass

import numpy as np

from tilewright.data.batches.pack_documents import Packing
from tilewright.data.common.hashing import ragged_arange

SPLITS = ("train", "holdout")
"""Names of the two parts of prepared data, and of the files of each."""
TOKEN_BYTES = "holdout.bytes.npy"
"""The file with the UTF-8 bytes that each held-out token stands for."""
IGNORE = -100
"""Label of a position that has no target."""
STARTS = "document_starts"
"""Name in a batch of `starts_of`; that of `ops.base.documents`, which needs torch."""


@dataclass(frozen=True)
class TextRows:
    """Rows of text of one split (training or held out) of all domains, in memory-mapped files.

    Args:
        tokens: uint16 or uint32 [stream], all documents.
        packing: which stream ranges make which row.
        row_length: S.
        shifted: labels are the next token (causal_lm); else labels are the token itself, to be masked (masked_lm).
        trained: uint8 [stream], 1 for tokens that are targets; None: all are.
    """

    tokens: np.ndarray
    packing: Packing
    row_length: int
    shifted: bool
    trained: np.ndarray | None = None

    def gather(self, rows_B: np.ndarray) -> dict[str, np.ndarray]:
        """Gather token rows as a batch: input_ids, labels, positions int64 [B, S] and segments int32 [B, S].

        Padding has input 0, label `IGNORE`, position 0, segment -1. Positions restart at 0 in every piece.
        """
        first, last = self.packing.first_R[rows_B], self.packing.first_R[rows_B + 1]
        num_pieces = last - first
        pieces = ragged_arange(first, num_pieces)
        segment = ragged_arange(np.zeros_like(first), num_pieces).astype(np.int32)
        flat, lengths = self._flat(pieces, segment)
        used_B = np.zeros(len(rows_B), np.int64)
        np.add.at(used_B, np.repeat(np.arange(len(rows_B)), num_pieces), lengths)
        return {name: laid_out(name, values, used_B, self.row_length) for name, values in flat.items()}

    def join(self, rows_N: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Join token rows that hold one piece each, behind each other: input_ids, labels, positions and segments [1,
        T].

        Args:
            rows_N: the rows; may be none.
            length: T, at least the tokens of all of them.
        """
        flat, lengths = self._flat(self.packing.first_R[rows_N], np.arange(len(rows_N), dtype=np.int32))
        return {name: laid_out(name, values, lengths.sum(keepdims=True), length) for name, values in flat.items()}

    def lengths(self, rows_N: np.ndarray) -> np.ndarray:
        """Tokens of rows that hold one piece each, int64."""
        return self.packing.lengths_P[self.packing.first_R[rows_N]].astype(np.int64)

    def _flat(self, pieces: np.ndarray, segments: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Arrays of the pieces of token rows behind each other, and the length of each."""
        starts, lengths = self.packing.starts_P[pieces], self.packing.lengths_P[pieces].astype(np.int64)
        at = ragged_arange(starts, lengths)
        return {
            "input_ids": self.tokens[at],
            "labels": self._labels(at + self.shifted),
            "positions": at - np.repeat(starts, lengths),
            "segments": np.repeat(segments, lengths),
        }, lengths

    def _labels(self, at: np.ndarray) -> np.ndarray:
        if self.trained is None:
            return self.tokens[at]
        return np.where(self.trained[at] != 0, self.tokens[at].astype(np.int64), IGNORE)

    def num_target_bytes(self, rows_B: np.ndarray, sizes: np.ndarray) -> int:
        """UTF-8 bytes of the text that the targets of token rows stand for.

        Args:
            rows_B: the rows.
            sizes: bytes of each token, [stream].
        """
        first, last = self.packing.first_R[rows_B], self.packing.first_R[rows_B + 1]
        pieces = ragged_arange(first, last - first)
        at = ragged_arange(self.packing.starts_P[pieces], self.packing.lengths_P[pieces].astype(np.int64))
        return int(sizes[at + self.shifted].sum(dtype=np.int64))

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """(first stream position, length) of the pieces of documents in one token row."""
        span = slice(self.packing.first_R[row], self.packing.first_R[row + 1])
        return list(zip(self.packing.starts_P[span].tolist(), self.packing.lengths_P[span].tolist(), strict=True))


def laid_out(name: str, values: np.ndarray, used_B: np.ndarray, length: int) -> np.ndarray:
    """Arrange values of token rows, one after the other, as a padded batch [B, S].

    Args:
        name: of the batch array, which decides dtype and filling.
        values: of all rows.
        used_B: how many of them are of each row.
        length: S.
    """
    shape = (len(used_B), length)
    dtype = np.int32 if name == "segments" else np.int64
    if len(values) == shape[0] * shape[1]:
        return values.astype(dtype, copy=False).reshape(shape)
    out = np.full(shape, {"labels": IGNORE, "segments": -1}.get(name, 0), dtype)
    out[np.arange(length) < used_B[:, None]] = values
    return out


def starts_of(lengths_N: np.ndarray, length: int) -> np.ndarray:
    """First tokens of the documents of a row, of the padding behind them, and the end: int32.

    Example:
        >>> starts_of(np.array([3, 2]), 8).tolist(), starts_of(np.array([3, 2]), 5).tolist()
        ([0, 3, 5, 8], [0, 3, 5])
    """
    ends_N = np.append(0, np.cumsum(lengths_N))
    return np.append(ends_N, [length][: int(ends_N[-1] < length)]).astype(np.int32)
