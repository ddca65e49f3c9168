"""Repairs of one text: line ends, blank edges, NUL, Unicode normal form, masks, and lines that are to go.

Stages that repair records, count their lines or read references use the same functions.
"""

import re
import unicodedata
from types import SimpleNamespace

import numpy as np
import xxhash

from tilewright.data.engine.build_settings import RepairSection

_MASKS = {
    "email": (re.compile(r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b"), "<email>"),
    "ip": (re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"), "<ip>"),
    "phone": (re.compile(r"(?<![\w.])\+\d{1,3}(?:[ ./()-]{0,2}\d){7,14}(?!\w)"), "<phone>"),
}


def repaired(text: str, repair: RepairSection | SimpleNamespace) -> tuple[str, list[str]]:
    """Repair one text: it, and what was changed besides line ends and blank edges.

    Example:
        >>> repaired("\\rWrite to a.b@example.org\\0\\r\\n", RepairSection(mask=("email",)))
        ('Write to <email>', ['NUL characters removed', 'email masked'])
    """
    notes = []
    text = text.replace("\r\n", "\n").replace("\r", "\n")
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
    """Hash of a line to repair one text by, of a domain, blanks at its ends left out."""
    return xxhash.xxh3_64_intdigest(f"{domain}\0{line.strip()}".encode())


def without_lines(text: str, domain: str, common: np.ndarray, least_chars: int) -> tuple[str, int]:
    """One text repaired to be without the lines whose hash is in `common` (sorted), and how many these were."""
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
