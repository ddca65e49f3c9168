"""The output of a reader: records to keep, and rejects with the reason.

A record is one text, image or sound together with the place that it came from, so that any training sample can be
traced to its file. Everything but `arrays` goes into Parquet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Modality = Literal["text", "image", "audio"]

BLANK = "blank record"
DUPLICATE = "exact duplicate"
EMPTY = "empty file"
HALF_PAIR = "half a Unicode surrogate pair"
LIMIT = "max_bytes reached"
NO_DOMAIN = "not in the wanted domains"
NOTHING = "nothing in it"
TOO_SMALL = "domain too small to hold a part out"
"""Reasons that recipes and builds share."""


@dataclass(slots=True)
class Record:
    """One sample on its way through the build. It is never changed, and not frozen: rows are read by the million, and
    a frozen object of 13 fields takes four times as long to make.

    `path` is relative to the source's root, as `printable` writes it. `start` and `stop` are bytes in that file, or in
    the file that `part` names: a row ("row 17"), a member of an archive ("a/b.txt"), a page ("page 3"); both are 0
    where they are unknown. A reader leaves `id` empty: the build derives it from path, part, place and content.
    `facts` are facts of the medium, such as width and height in pixels or duration in seconds. `arrays` (images,
    log-mel frames) stay in memory or go to files of their own. `chunk` numbers the pieces of a record that was cut.

    Example:
        >>> Record("", "text", "books", "Call me Ishmael.", path="books/moby.txt", stop=16).modality
        'text'
    """

    id: str
    modality: Modality
    domain: str
    text: str
    language: str = ""
    path: str = ""
    start: int = 0
    stop: int = 0
    part: str = ""
    facts: Mapping[str, int | float | str] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    scores: Mapping[str, float] = field(default_factory=dict)
    chunk: int = 0

    @property
    def place(self) -> str:
        """The place of a record, file and part, for a person to find it again."""
        return f"{self.path}, {self.part}" if self.part else self.path


@dataclass(frozen=True)
class Rejected:
    """Something that was dropped, by which `rule` of which `stage`, and the `value` that failed against `threshold`.

    `value` is what was found (a number, or words where there is none), `threshold` what would have passed. `excerpt` is
    the beginning of the text, or what the decoder said. `count` is how many lines, rows or members share the reason;
    `num_bytes` is what they weigh together, 0 where it is unknown. `id` is that of a record that was dropped whole.

    Example:
        >>> Rejected("a.zip", "b.txt", "read", "compression ratio", 4096.0, 200.0, "", "text").rule
        'compression ratio'
    """

    path: str
    part: str
    stage: str
    rule: str
    value: float | str
    threshold: float | str
    excerpt: str = ""
    domain: str = ""
    count: int = 1
    num_bytes: int = 0
    id: str = ""


def text_of(path: str, text: str, part: str = "") -> Record:
    """The record of a text out of `part` of the file `path`.

    Example:
        >>> text_of("a.jsonl", "Call me Ishmael.", "line 3").place
        'a.jsonl, line 3'
    """
    return Record("", "text", "", text, path=path, part=part)


def rejected(
    path: str, rule: str, value: float | str = "", *, part: str = "", count: int = 1, num_bytes: int = 0
) -> Rejected:
    """Make the reject of a file or a part of it, for a reader that knows no more than these facts."""
    return Rejected(path, part, "read", rule, value, "", count=count, num_bytes=num_bytes)
