"""One file that is read, or one member of an archive, and the records and rejects that come of it.

Also the error of a package that is not installed.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tilewright.core.errors import HardwareError
from tilewright.data.common.records import Modality, Record, Rejected
from tilewright.data.readers.limits import ReadLimits, ReadOptions

STAGE = "read"
INSTALL = 'pip install "tilewright[data]"'


class Span(NamedTuple):
    """Bytes [start, stop) of a file: of it the lines that begin there are read."""

    start: int
    stop: int


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
    span: Span | None = None
    """None: the whole file. Plain text, Markdown and rows of JSON alone are read in spans."""

    def member(self, path: Path, inner: str, shown: str) -> "Entry":
        """The entry of a file that was unpacked to `path` out of this one and is `shown` as part of it."""
        return replace(self, path=path, inner=inner, part=self.join(shown), depth=self.depth + 1)

    @property
    def folders(self) -> int:
        """Count the folders of a file's path that are in the source, its own included, two at most; 0 in an archive."""
        return 0 if self.part else min(2, 1 + self.name.count("/"))

    def join(self, part: str) -> str:
        """`part` of a file's entry, as a part of the source's file."""
        return f"{self.part} > {part}" if self.part and part else self.part or part

    def record(self, modality: Modality, text: str, part: str = "", **fields: Any) -> Record:
        """A record out of `part` of a file's entry."""
        return Record("", modality, self.domain, text, path=self.name, part=self.join(part), **fields)

    def reject(
        self,
        rule: str,
        value: float | str,
        threshold: float | str = "",
        excerpt: str = "",
        part: str = "",
        *,
        count: int = 1,
        num_bytes: int = 0,
    ) -> Rejected:
        """A reject of `part` of a file's entry."""
        value = self._said(value) if isinstance(value, str) else value
        said = self._said(excerpt)[:200]
        part = self.join(part)
        return Rejected(self.name, part, STAGE, rule, value, threshold, said, self.domain, count, num_bytes)

    def _said(self, text: str) -> str:
        """The message of a parser on a file's entry, as UTF-8 can hold it and without the place of the file on this
        machine."""
        return text.replace(str(self.path), self.inner).encode("utf-8", "backslashreplace").decode()

    def need(self, package: str, *, of_format: bool = True) -> None:
        """Check for a file's entry that a package is there that it needs.

        Args:
            package: by the name that it is imported by.
            of_format: files of this suffix need it; False: this one for what is in it.

        Raises:
            HardwareError: it is not installed. A build without it would leave out files that are good.
        """
        suffix = PurePosixPath(self.inner).suffix.lower() if of_format else ""
        need_package(package, f"{self.name} > {self.part}" if self.part else self.name, suffix)


def need_package(package: str, what: str, suffix: str = "") -> None:
    """Check for a file's entry that `package` is installed, which `what` needs, as all files with `suffix` do.

    Raises:
        HardwareError: it is not.
    """
    if find_spec(package) is None:
        way = f"{INSTALL}, and the same command again: finished units stay"
        raise HardwareError(
            f"Package {package} is not installed",
            got=what,
            need=f"{package}, which reads it",
            try_=way
            + (f'\nor in [read]: suffixes = {{ "{suffix}" = "none" }}, to leave such files out' if suffix else ""),
        )
