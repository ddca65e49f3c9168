"""One file that is read, or one member of an archive, and the records and rejects that come of it.

Also what the readers share: which errors of a parser mean damaged input, and the reject of a missing package.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tilewright.data.readers.limits import ReadLimits, ReadOptions
from tilewright.data.records import Modality, Record, Rejected

STAGE = "read"
INSTALL = 'pip install "tilewright[data]"'
_MISSING = "missing package "

PARSER_ERRORS = (
    *(ValueError, LookupError, TypeError, ArithmeticError, AttributeError, AssertionError, SyntaxError),
    *(OSError, EOFError, RuntimeError, MemoryError, BufferError, struct.error, zlib.error),
)
"""What other projects' parsers raise on damaged files, by experience with random ones. Only around calls of them."""


@dataclass(frozen=True)
class Entry:
    """A file on disk that is read as `part` of the source's file `name`.

    `path` has the bytes: those of the source's file, or of a temporary one that a member was unpacked to; `inner` is
    what that member was called, with its suffix. `depth` counts the archives that it is in.
    """

    path: Path
    name: str
    domain: str
    limits: ReadLimits
    options: ReadOptions
    inner: str
    part: str = ""
    depth: int = 0

    def member(self, path: Path, inner: str, shown: str) -> "Entry":
        """The entry of a file that was unpacked to `path` out of this one and is `shown` as part of it."""
        return replace(self, path=path, inner=inner, part=self.join(shown), depth=self.depth + 1)

    def join(self, part: str) -> str:
        """`part` of this entry, as a part of the source's file."""
        return f"{self.part} > {part}" if self.part and part else self.part or part

    def record(self, modality: Modality, text: str, part: str = "", **fields: Any) -> Record:
        """A record out of `part` of this entry."""
        return Record("", modality, self.domain, text, path=self.name, part=self.join(part), **fields)

    def reject(
        self, rule: str, value: float | str, threshold: float | str = "", excerpt: str = "", part: str = "", **sums: int
    ) -> Rejected:
        """A reject of `part` of this entry; `sums` are `count` and `num_bytes`."""
        return Rejected(
            self.name, self.join(part), STAGE, rule, value, threshold, excerpt[:200], domain=self.domain, **sums
        )

    def missing(self, package: str) -> Rejected | None:
        """A reject if `package` is not installed."""
        if find_spec(package):
            return None
        return self.reject(_MISSING + package, "not installed", INSTALL, num_bytes=self.path.stat().st_size)


def failure(error: BaseException) -> str:
    """What an error says, in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}".rstrip(": ")


def missing_once(items: Iterable[Record | Rejected]) -> Iterator[Record | Rejected]:
    """`items` with the rejects of each missing package put together into one at the end, with their count.

    Example:
        >>> def of(name): return Rejected(name, "", "read", "missing package pypdf", "not installed", INSTALL)
        >>> [(item.path, item.count) for item in missing_once([of("a.pdf"), of("b.pdf")])]
        [('a.pdf', 2)]
    """
    held: dict[tuple[str, str], Rejected] = {}
    for item in items:
        if isinstance(item, Record) or not item.rule.startswith(_MISSING):
            yield item
            continue
        first = held.setdefault((item.domain, item.rule), replace(item, count=0, num_bytes=0))
        sums = {"count": first.count + item.count, "num_bytes": first.num_bytes + item.num_bytes}
        held[item.domain, item.rule] = replace(first, **sums)
    yield from held.values()
