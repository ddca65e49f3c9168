"""Temporary files of the readers: what goes wrong with them is no fault of the file that is read.

An error of theirs is one of the user's machine, in four parts, and never a reject.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from tilewright.core.errors import TilewrightError, machine_error


@contextmanager
def own_files() -> Iterator[None]:
    """Open around a use of temporary files alone, so that errors are theirs.

    Raises:
        TilewrightError: for any error of the system.
    """
    try:
        yield
    except OSError as error:
        raise temporary_error(error) from error


def temporary_error(error: BaseException) -> TilewrightError:
    """The error of temporary files that cannot be written, or read back."""
    try:
        where = tempfile.gettempdir()
    except FileNotFoundError:
        where = "no folder for temporary files"
    return machine_error(error, where, disk="free some space there, or TMPDIR=another folder")


class ScratchFolder:
    """A temporary folder. A context manager, which removes it.

    Raises:
        TilewrightError: it cannot be made.
    """

    def __init__(self) -> None:
        with own_files():
            self._held = tempfile.TemporaryDirectory(prefix="tilewright-", ignore_cleanup_errors=True)
        self.path = Path(self._held.name)

    def close(self) -> None:
        """Close the folder of temporary files: remove it."""
        self._held.cleanup()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


class ScratchFile:
    """A file in it that is written. A context manager.

    Raises:
        TilewrightError: it cannot be written, in each method.
    """

    def __init__(self, path: Path):
        with own_files():
            self._file = path.open("wb")

    def write(self, data: bytes) -> None:
        with own_files():
            self._file.write(data)

    def __enter__(self) -> "ScratchFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        with own_files():
            self._file.close()
