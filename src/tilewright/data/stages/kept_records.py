"""The output of stages on records: the side table of those that stay, and the rejects of the others.

A side table is not a copy of the text: row, digest of the text, bytes, language, scores.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tilewright.data.common.record_filter import DropReason
from tilewright.data.common.records import Rejected
from tilewright.data.engine.record_tables import reject_row, rows

SCORES = ("quality", "contrast", "bits_per_byte")
"""Columns that the stages of `scores` fill."""
KEPT = pa.schema(
    [
        pa.field("row", pa.int64()),
        pa.field("digest", pa.binary(16)),
        pa.field("bytes", pa.int64()),
        pa.field("language", pa.string()),
        *(pa.field(name, pa.float32()) for name in SCORES),
    ]
)
"""A record that stays. A score is null where no stage gave one."""


def survivors(kept: Path, *drops: np.ndarray) -> Iterator[dict[str, Any]]:
    """Kept records that survive: rows of a `kept.parquet` whose `row` is in none of the sorted arrays `drops`."""
    gone = set(np.concatenate([np.zeros(0, np.int64), *drops]).tolist())
    for row in rows(kept):
        if row["row"] not in gone:
            yield row


def reject_of(row: Mapping[str, Any], stage: str, reason: DropReason, num_bytes: int | None = None) -> dict[str, Any]:
    """The reject of a record that a stage does not keep: a row of `tables.REJECTS`.

    Args:
        row: of the record: path, part, text, domain and id.
        stage: its name.
        reason: the reason.
        num_bytes: of the part of the text that goes; None: of all of it.
    """
    size = len(row["text"].encode()) if num_bytes is None else num_bytes
    return reject_row(
        Rejected(
            *(row["path"], row["part"], stage, reason.rule, reason.value, reason.threshold),
            *(row["text"], row["domain"], 1, size, row["id"]),
        )
    )
