"""Second stage: the text of each record as it will be trained on.

Unix line ends, no blank edges, no NUL, one Unicode normal form; on request personal data masked, and lines removed that
occur in many records of a domain.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tilewright.data.build.config import RepairSection
from tilewright.data.build.tables import RECORDS, REJECTS, TableWriter, reject_row, rows
from tilewright.data.common.records import Rejected

STAGE = "repair"
_MASKS = {
    "email": (re.compile(r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b"), "<email>"),
    "ip": (re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"), "<ip>"),
    "phone": (re.compile(r"(?<![\w.])\+\d{1,3}(?:[ ./()-]{0,2}\d){7,14}(?!\w)"), "<phone>"),
}


def repair_shard(source: Path, common: np.ndarray, repair: RepairSection, folder: Path) -> Mapping[str, Any]:
    """Repair the records of `source` (a unit of the stage before).

    Args:
        source: folder with `records.parquet`.
        common: sorted uint64 hashes of the lines that are removed, see `line_hash`.
        repair: settings.
        folder: gets `records.parquet` and `rejects.parquet`.

    Returns:
        Counts: records, bytes, rejects, and how many records each repair changed.
    """
    changed: Counter[str] = Counter()
    num_bytes = 0
    with (
        TableWriter(folder / "records.parquet", RECORDS) as records,
        TableWriter(folder / "rejects.parquet", REJECTS) as rejects,
    ):
        for row in rows(source / "records.parquet"):
            text, notes = repaired(row["text"], repair)
            if len(common):
                text, num_lines = without_lines(text, row["domain"], common, repair.repeated_line_chars)
                notes += ["repeated lines removed"] if num_lines else []
            changed.update(notes)
            if text.strip() or (row["modality"] != "text" and not row["text"].strip()):
                records.append(row | {"text": text})
                num_bytes += len(text.encode())
            else:
                place = row["path"], row["part"]
                size = len(row["text"].encode())
                one = Rejected(*place, STAGE, "blank record", 0.0, 1.0, row["text"], row["domain"], 1, size, row["id"])
                rejects.append(reject_row(one))
        counts = {"records": records.num_rows, "bytes": num_bytes, "rejects": rejects.num_rows}
    return counts | {"changed": dict(sorted(changed.items()))}


def repaired(text: str, repair: RepairSection) -> tuple[str, list[str]]:
    """The repaired text, and what was changed besides line ends and blank edges.

    Example:
        >>> repaired("\\r\\nWrite to a.b@example.org\\0\\r\\n", RepairSection(mask=("email",)))
        ('Write to <email>', ['NUL characters removed', 'email masked'])
    """
    notes = []
    text = text.replace("\r\n", "\n")
    if "\0" in text:
        text = text.replace("\0", "")
        notes.append("NUL characters removed")
    if repair.unicode == "nfc" and not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
        notes.append("Unicode normalised")
    for name in repair.mask:
        pattern, word = _MASKS[name]
        text, number = pattern.subn(word, text)
        if number:
            notes.append(f"{name} masked")
    return text.strip("\n"), notes


def line_hash(domain: str, line: str) -> int:
    """Hash of a line of a domain, blanks at its ends left out."""
    return xxhash.xxh3_64_intdigest(f"{domain}\0{line.strip()}".encode())


def without_lines(text: str, domain: str, common: np.ndarray, least_chars: int) -> tuple[str, int]:
    """The text without the lines whose hash is in `common` (sorted), and how many these were."""
    lines = text.split("\n")
    asked = [i for i, line in enumerate(lines) if len(line.strip()) >= least_chars]
    if not asked:
        return text, 0
    hashes = np.array([line_hash(domain, lines[i]) for i in asked], np.uint64)
    at = np.minimum(np.searchsorted(common, hashes), len(common) - 1)
    gone = {i for i, found in zip(asked, (common[at] == hashes).tolist(), strict=True) if found}
    if not gone:
        return text, 0
    return "\n".join(line for i, line in enumerate(lines) if i not in gone).strip("\n"), len(gone)
